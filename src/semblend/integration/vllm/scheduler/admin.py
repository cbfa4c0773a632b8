"""What an operator may ask of the donors of a running engine: list them, keep some, forget some, by tenant.

A tenant of vLLM is a ``cache_salt``. It is shown as `name_tenant` shows it, never as it is.

Lists come from the donor store, which is safe for threads. Whatever changes donors is put in a queue that the
scheduler's side empties in its own thread, before it looks anything up and once a step: no command meets a step
halfway.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semblend.discover.donor import Donor
from semblend.errors import InputError, SemBlendError
from semblend.facade import SemBlend

ACTIONS = ("list", "tenants", "pin", "unpin", "forget")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DonorCommand:
    """One of `ACTIONS`, for one donor, for the donors of one tenant (``""``: those without a salt), or for all."""

    action: str
    tenant: str | None = None
    donor_id: str | None = None
    everything: bool = False
    limit: int = 50

    @classmethod
    def parse(cls, given: Any) -> DonorCommand:
        """A command as it comes over the wire; unknown words in it are an error."""
        if not isinstance(given, Mapping) or not set(given) <= set(cls.__slots__):
            raise InputError("a command is an object with the known fields", hint=f"fields: {', '.join(cls.__slots__)}")
        command = cls(**{"action": "", **given})
        words = (command.tenant, command.donor_id)
        if command.action not in ACTIONS:
            raise InputError(f"unknown action {command.action!r}", hint=f"one of {', '.join(ACTIONS)}")
        if not all(word is None or isinstance(word, str) for word in words) or type(command.limit) is not int:
            raise InputError("tenant and donor_id are strings, limit is a whole number", hint="see docs/guides/vllm.md")
        if command.changes and sum((*(word is not None for word in words), command.everything is True)) != 1:
            raise InputError(f"{command.action} needs one of tenant, donor_id, everything", hint="say which donors")
        return command

    @property
    def changes(self) -> bool:
        return self.action in ("pin", "unpin", "forget")

    def chooses(self, donor: Donor) -> bool:
        """Whether the command is about this donor."""
        by_tenant = self.tenant is None or donor.namespace.tenant == self.tenant
        return by_tenant and (self.donor_id is None or donor.donor_id == self.donor_id)


class DonorAdmin:
    """Takes commands from other threads; ``act`` does one to one donor, in the scheduler's thread.

    ``find_heir``: the donor that holds what stood under an id: earlier turns of a conversation are in its newest donor.
    ``patience_s``: how long a caller waits for the scheduler. An idle engine has no steps: its caller is told that the
    command is queued, and it is done before anything else happens.
    """

    def __init__(
        self,
        semblend: SemBlend,
        act: Callable[[str, str], bool],
        *,
        find_heir: Callable[[str], str | None] = lambda donor_id: donor_id,
        patience_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._semblend, self._act, self._patience_s, self._clock = semblend, act, patience_s, clock
        self._find_heir = find_heir
        self._queue: queue.SimpleQueue[tuple[DonorCommand, Future[int]]] = queue.SimpleQueue()

    def answer(self, given: Any) -> Answer:
        """What to tell whoever sent this; a mistake is an answer too. From any thread."""
        try:
            command = DonorCommand.parse(given)
            if command.changes:
                return {"ok": True, **self._order(command)}
            return {"ok": True, **(self._list(command) if command.action == "list" else self._sum_up())}
        except SemBlendError as error:
            return {"ok": False, "error": error.message, "hint": error.hint or ""}
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "hint": "the engine's log may say more"}

    def work_off(self) -> None:
        """Do what is queued; in the scheduler's thread."""
        while not self._queue.empty():
            command, done = self._queue.get()
            try:
                chosen = [donor.donor_id for donor in self._choose(command)]
                done.set_result(sum(self._act(command.action, donor_id) for donor_id in chosen))
            except Exception as error:  # it is the operator's to hear, not the scheduler's
                done.set_exception(error)

    def _order(self, command: DonorCommand) -> Answer:
        done: Future[int] = Future()
        self._queue.put((command, done))
        try:
            return {"action": command.action, "donors": done.result(self._patience_s), "queued": False}
        except NotYet:
            return {"action": command.action, "donors": len(self._choose(command)), "queued": True}

    def _choose(self, command: DonorCommand) -> list[Donor]:
        if command.donor_id is not None:
            command = replace(command, donor_id=self._find_heir(command.donor_id) or command.donor_id)
        return [donor for donor in self._semblend.donors() if command.chooses(donor)]

    def _list(self, command: DonorCommand) -> Answer:
        chosen = self._choose(command)
        shown = chosen[-command.limit :] if command.limit > 0 else chosen
        return {"donors": [self._show(donor) for donor in reversed(shown)], "total": len(chosen)}

    def _show(self, donor: Donor) -> Answer:
        return {
            "donor_id": donor.donor_id,
            "tenant": donor.namespace.tenant,
            "namespace": donor.namespace.digest,
            "tokens": donor.token_count,
            "age_s": round(max(0.0, self._clock() - donor.created_unix_s), 1),
            "pinned": donor.pinned,
        }

    def _sum_up(self) -> Answer:
        return {"tenants": [{"tenant": name, **counts} for name, counts in _count(self._semblend.donors()).items()]}


def _count(donors: Iterable[Donor]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for donor in donors:
        counts = found.setdefault(donor.namespace.tenant, {"donors": 0, "tokens": 0, "pinned": 0})
        counts["donors"] += 1
        counts["tokens"] += donor.token_count
        counts["pinned"] += donor.pinned
    return found


# -- A Unix socket for the operator of one machine: a line of JSON in, a line of JSON out.
#
# Only the user who runs the engine, and root, are answered: the socket's file is theirs alone, and the kernel says who
# is at the other end. There is no network in it and no key to lose.


MAX_BYTES = 1 << 16
TIMEOUT_S = 5.0
MAX_ENGINES = 64

log = logging.getLogger("vllm.semblend")


class AdminSocket:
    """Serves ``answer`` at ``path``, or, where another engine serves there, at ``path.1``, ``path.2`` and so on."""

    def __init__(self, path: str | Path, answer: Callable[[Any], dict[str, Any]]) -> None:
        self._answer = answer
        self.path, self._listener = _listen(Path(path).expanduser())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="semblend-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and remove the file."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            with caller:
                try:
                    caller.settimeout(TIMEOUT_S)
                    asked = _receive(caller)  # a stranger's word too, or it would meet a closed line while it speaks
                    _send(caller, self._answer(asked) if _is_operator(caller) else _STRANGER)
                except Exception as error:  # one caller's trouble; the next is served
                    log.debug("SemBlend: an administrator's call failed: %s", error)


_STRANGER = {"ok": False, "error": "this socket serves the user who runs the engine", "hint": "run it as that user"}


def find_sockets(path: str | Path) -> list[Path]:
    """The sockets of all engines that were given this path."""
    first = Path(path).expanduser()
    numbered = [first.with_name(f"{first.name}.{number}") for number in range(1, MAX_ENGINES)]
    return [found for found in (first, *numbered) if found.is_socket()]


def ask(path: Path, command: dict[str, Any]) -> dict[str, Any]:
    """Send a command to one engine; its answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(TIMEOUT_S)
            line.connect(str(path))
            _send(line, command)
            answer = _receive(line, most=1 << 26)
    except OSError as error:
        raise SemBlendError(
            f"no engine answers at {path}: {error}", hint="is it running, and are you its user?"
        ) from None
    if not isinstance(answer, dict):
        raise SemBlendError(f"{path} answered nonsense", hint="is it the socket of a vLLM with SemBlend?")
    return answer


def _listen(path: Path) -> tuple[Path, socket.socket]:
    for number in range(MAX_ENGINES):
        place = path if number == 0 else path.with_name(f"{path.name}.{number}")
        if place.exists() and (not place.is_socket() or _is_served(place)):
            continue
        with contextlib.suppress(FileNotFoundError):
            place.unlink()  # of an engine that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(place))
            place.chmod(stat.S_IRUSR | stat.S_IWUSR)
            listener.listen(8)
        except OSError as error:
            listener.close()
            raise InputError(
                f"cannot serve at {place}: {error}", hint="admin_socket names a file in a folder of yours"
            ) from error
        return place, listener
    raise InputError(f"{path} and its successors are taken", hint="admin_socket names a new file")


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(1.0)
        try:
            line.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # somebody else's, or busy: not ours to remove
            return True
        return True


def _is_operator(caller: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):  # not Linux: the file's mode has to do
        return True
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (0, os.geteuid())


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    line.sendall(json.dumps(message).encode() + b"\n")


def _receive(line: socket.socket, most: int = MAX_BYTES) -> Any:
    """One line of JSON; None where it is none, or too long."""
    received = bytearray()
    while not received.endswith(b"\n") and len(received) <= most:
        part = line.recv(1 << 16)
        if not part:
            break
        received += part
    try:
        return json.loads(received) if len(received) <= most else None
    except ValueError:
        return None
