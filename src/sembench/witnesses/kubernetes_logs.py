"""A pod's log: through the official Kubernetes client where it is installed, through kubectl where it is not.

Both ways answer the same: whole lines as the container wrote them, from ``since_time`` on, the last ``tail`` of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from semblend.errors import InputError, MissingDependencyError

DEFAULT_TAIL = 2000
Client = Literal["auto", "python", "kubectl"]

# The typed client asks by age, not by time; asking for a little more and cutting by the server's own time stamps is
# exact even where our clock is wrong by this much.
_CLOCK_MARGIN_S = 300
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|m|s)")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, slots=True)
class PodLog:
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


def read_pod_log(wanted: PodLog, client: Client = "auto") -> Iterator[str]:
    """The lines, without line breaks; refusals of the cluster become one-line errors with a hint."""
    if client == "auto":
        client = "python" if importlib.util.find_spec("kubernetes") is not None else "kubectl"
    return _through_client(wanted) if client == "python" else _through_kubectl(wanted)


def parse_duration(duration: str) -> float:
    """A duration as kubectl writes it, in seconds.

    >>> parse_duration("1h30m")
    5400.0
    """
    parts = _DURATION.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise InputError(f"--since {duration!r} is no duration", hint="write it like 90s, 15m or 1h30m")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def parse_time(text: str) -> datetime:
    """A time with its zone, as RFC 3339 writes it.

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


# -- kubectl -------------------------------------------------------------------------------------------------------


def build_command(wanted: PodLog) -> list[str]:
    """The command line; every value is its own word, so that no name can become a flag."""
    command = ["kubectl", "--namespace", wanted.namespace, "logs", f"pod/{wanted.pod}"]
    command += [f"--tail={-1 if wanted.tail is None else wanted.tail}"]
    if wanted.container:
        command += ["--container", wanted.container]
    if wanted.since_time is not None:
        command += [f"--since-time={wanted.since_time.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"]
    if wanted.since_s is not None:
        command += [f"--since={max(1, round(wanted.since_s))}s"]
    if wanted.previous:
        command += ["--previous"]
    if wanted.context:
        command += ["--context", wanted.context]
    if wanted.kubeconfig:
        command += ["--kubeconfig", wanted.kubeconfig]
    return command


def _through_kubectl(wanted: PodLog) -> Iterator[str]:
    if shutil.which("kubectl") is None:
        raise MissingDependencyError(
            "neither the kubernetes package nor kubectl is there",
            hint="pip install 'semblend-suite[k8s]', or put kubectl on the PATH",
        )
    with tempfile.TemporaryFile() as written:
        try:
            done = subprocess.run(
                build_command(wanted), stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.PIPE,
                timeout=wanted.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(
                f"kubectl gave no log of {wanted.name} within {wanted.timeout_s:g} s", hint="check the connection"
            ) from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            what = re.sub(r"^(?:error:|Error from server[^:]*:)\s*", "", said[-1]) if said else "no reason given"
            raise _make_error(wanted, what)
        written.seek(0)
        for line in written:
            yield line.decode("utf-8", "replace").rstrip("\r\n")


# -- the official client -------------------------------------------------------------------------------------------


def _through_client(wanted: PodLog) -> Iterator[str]:
    api, api_error = _core_api(wanted)
    age = wanted.since_s
    if wanted.since_time is not None:
        age = (datetime.now(UTC) - wanted.since_time).total_seconds() + _CLOCK_MARGIN_S
    query = {
        "container": wanted.container,
        "tail_lines": wanted.tail,
        "since_seconds": None if age is None else max(1, round(age)),
        "previous": wanted.previous or None,
        "timestamps": True if wanted.since_time is not None else None,
    }
    asked = {name: value for name, value in query.items() if value is not None}
    try:
        response = api.read_namespaced_pod_log(
            wanted.pod, wanted.namespace, _preload_content=False, _request_timeout=wanted.timeout_s, **asked
        )
        data: bytes = response.data if isinstance(response.data, bytes) else response.read()
    except api_error as error:
        raise _make_error(wanted, _message_of(error), getattr(error, "status", None)) from None
    except Exception as error:  # urllib3 has a family of errors for a server that can't be reached
        if not type(error).__module__.startswith("urllib3"):
            raise
        raise InputError(
            f"cannot reach the Kubernetes API for {wanted.name}: {_cause(error)}",
            hint="check --context, --kubeconfig and the connection",
        ) from None
    for line in data.decode("utf-8", "replace").splitlines():
        kept = line if wanted.since_time is None else _after(line, wanted.since_time)
        if kept is not None:
            yield kept


def _core_api(wanted: PodLog) -> tuple[Any, type[Exception]]:
    try:
        client = importlib.import_module("kubernetes.client")
        config = importlib.import_module("kubernetes.config")
    except ImportError:
        raise MissingDependencyError(
            "the kubernetes package is not installed", hint="pip install 'semblend-suite[k8s]', or --client kubectl"
        ) from None
    try:
        if wanted.kubeconfig or wanted.context:
            config.load_kube_config(config_file=wanted.kubeconfig, context=wanted.context)
        else:
            config.load_config()  # a pod's own service account where there is no file
    except (config.ConfigException, OSError) as error:
        raise InputError(
            f"no usable Kubernetes configuration: {_last_line(str(error))}", hint="check --kubeconfig and --context"
        ) from None
    return client.CoreV1Api(), client.ApiException


def _after(line: str, since: datetime) -> str | None:
    """The line without its time stamp, or None if it is older; a line without a stamp continues the one before."""
    stamp, _, text = line.partition(" ")
    try:
        return text if parse_time(stamp) >= since else None
    except InputError:
        return line


def _message_of(error: Exception) -> str:
    body = getattr(error, "body", None)
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        message = json.loads(text).get("message")
    except (ValueError, AttributeError):
        message = None
    return str(message or getattr(error, "reason", None) or error)


def _make_error(wanted: PodLog, what: str, status: int | None = None) -> InputError:
    text = what.lower()
    if "container name must be specified" in text or ("container" in text and "not valid" in text):
        hint = "name one with --container"
    elif status == 404 or "not found" in text:
        hint = "check --namespace, --pod and --context"
    elif status in (401, 403) or "forbidden" in text or "unauthorized" in text:
        hint = "the account needs the right to get pods/log in this namespace"
    elif "refused" in text or "timeout" in text or "no such host" in text:
        hint = "check --context, --kubeconfig and the connection"
    else:
        hint = "run kubectl logs by hand to see more"
    return InputError(f"cannot read the log of {wanted.name}: {what}", hint=hint)


def _cause(error: Exception) -> str:
    """The end of urllib3's sentence, where the reason stands; the address before it is in the kubeconfig."""
    cause = str(getattr(error, "reason", None) or error)
    return _last_line(cause.rpartition(": ")[2])


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:200] if text.strip() else "no reason given"
