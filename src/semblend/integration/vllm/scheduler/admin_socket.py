"""A Unix socket for the operator of one machine: a line of JSON in, a line of JSON out.

Only the user who runs the engine, and root, are answered: the socket's file is theirs alone, and the kernel says who is
at the other end. There is no network in it and no key to lose.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semblend.errors import InputError, SemBlendError

MOST_BYTES = 1 << 16
TIMEOUT_S = 5.0
MOST_ENGINES = 64

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
    numbered = [first.with_name(f"{first.name}.{number}") for number in range(1, MOST_ENGINES)]
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
    for number in range(MOST_ENGINES):
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


def _receive(line: socket.socket, most: int = MOST_BYTES) -> Any:
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
