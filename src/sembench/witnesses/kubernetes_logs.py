"""Reads the log of a pod with kubectl: whole lines, as the container wrote them.

kubectl brings the user's own login and contexts, so no Kubernetes package is needed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from semblend.errors import InputError, MissingDependencyError

DEFAULT_TAIL = 2000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|m|s)")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, slots=True)
class PodLogQuery:
    """Which lines of which container. ``tail`` None means all of them."""

    namespace: str
    pod: str
    container: str | None = None
    tail: int | None = DEFAULT_TAIL
    since_s: float | None = None
    since_time: datetime | None = None
    previous: bool = False
    context: str | None = None
    kubeconfig: str | None = None
    timeout_s: float = 300.0

    @property
    def name(self) -> str:
        return f"pod {self.namespace}/{self.pod}" + (f" container {self.container}" if self.container else "")


def read_pod_log(query: PodLogQuery) -> Iterator[str]:
    """Yield the lines of the log without line breaks. A refusal of the cluster becomes a one-line error with a hint."""
    if shutil.which("kubectl") is None:
        raise MissingDependencyError("kubectl is not installed", hint="put kubectl on the PATH")
    with tempfile.TemporaryFile() as written:
        try:
            done = subprocess.run(
                build_command(query), stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.PIPE,
                timeout=query.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(
                f"kubectl gave no log of {query.name} within {query.timeout_s:g} s", hint="check the connection"
            ) from None
        if done.returncode:
            raise _make_error(query, done.stderr.decode("utf-8", "replace"))
        written.seek(0)
        for line in written:
            yield line.decode("utf-8", "replace").rstrip("\r\n")


def build_command(query: PodLogQuery) -> list[str]:
    """Return the kubectl command line. Every value is one word, so that no name can become a flag."""
    command = ["kubectl", "--namespace", query.namespace, "logs", f"pod/{query.pod}"]
    command += [f"--tail={-1 if query.tail is None else query.tail}"]
    if query.container:
        command += ["--container", query.container]
    if query.since_time is not None:
        command += [f"--since-time={query.since_time.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"]
    if query.since_s is not None:
        command += [f"--since={max(1, round(query.since_s))}s"]
    if query.previous:
        command += ["--previous"]
    if query.context:
        command += ["--context", query.context]
    if query.kubeconfig:
        command += ["--kubeconfig", query.kubeconfig]
    return command


def parse_duration(duration: str) -> float:
    """Convert a duration as kubectl writes it into seconds.

    >>> parse_duration("1h30m")
    5400.0
    """
    parts = _DURATION.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise InputError(f"--since {duration!r} is no duration", hint="write it like 90s, 15m or 1h30m")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def parse_time(text: str) -> datetime:
    """Read a time with its zone, as RFC 3339 writes it.

    >>> parse_time("2026-06-22T18:00:00Z").isoformat()
    '2026-06-22T18:00:00+00:00'
    """
    try:
        # Python reads microseconds at most; containers write nanoseconds.
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or "T" not in text.upper():
        raise InputError(
            f"--since-time {text!r} is no RFC 3339 time", hint="write it like 2026-06-22T18:00:00Z, with its zone"
        )
    return found


def _make_error(query: PodLogQuery, said: str) -> InputError:
    """Turn the last line that kubectl wrote to standard error into an error with a hint."""
    lines = said.strip().splitlines()
    why = re.sub(r"^(?:error:|Error from server[^:]*:)\s*", "", lines[-1]) if lines else "no reason given"
    text = why.lower()
    if "container name must be specified" in text or ("container" in text and "not valid" in text):
        hint = "name one with --container"
    elif "not found" in text:
        hint = "check --namespace, --pod and --context"
    elif "forbidden" in text or "unauthorized" in text:
        hint = "the account needs the right to get pods/log in this namespace"
    elif "refused" in text or "timeout" in text or "no such host" in text:
        hint = "check --context, --kubeconfig and the connection"
    else:
        hint = "run kubectl logs by hand to see more"
    return InputError(f"cannot read the log of {query.name}: {why}", hint=hint)
