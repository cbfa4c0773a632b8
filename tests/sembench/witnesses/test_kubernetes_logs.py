"""A pod's log through kubectl: a script in its place, and the real one against a cluster that fits in this file."""

from __future__ import annotations

import json
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from sembench.cli import main
from sembench.commands.witnesses import PodLogQuery, build_command, parse_duration, parse_time, read_pod_log
from semblend.errors import InputError, MissingDependencyError

LINES = [
    ("2026-06-22T17:59:58.000000001Z", "[FUZZY] register_donor: ok request_id=old tokens=64"),
    ("2026-06-22T18:00:00.000000000Z", "[FUZZY] register_donor: ok request_id=a tokens=512"),
    ("2026-06-22T18:00:01.500000000Z", "[FUZZY] semantic hit request_id=b similarity=0.91 matched_tokens=96"),
    ("2026-06-22T18:00:02.000000000Z", "[FUZZY] Realized 96 fuzzy tokens request_id=b"),
]
LOG = "/api/v1/namespaces/inference/pods/sglang-0/log"


class Cluster(BaseHTTPRequestHandler):
    """Answers as an API server does: the recorded log, or a Status object."""

    asked: list[dict[str, list[str]]]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path == LOG:
            type(self).asked.append(query)
            if query.get("container") == ["nope"]:
                self.refuse(400, "container nope is not valid for pod sglang-0")
            elif "container" not in query:
                self.refuse(400, "a container name must be specified for pod sglang-0, choose one of: [engine proxy]")
            else:
                self.answer(200, self.log(query), "text/plain")
        elif url.path.startswith("/api/v1/namespaces/secret/"):
            self.refuse(403, 'pods "sglang-0" is forbidden: User "me" cannot get resource "pods/log"')
        elif url.path == "/api/v1/namespaces/inference/pods/sglang-0":
            containers = [{"name": "engine"}, {"name": "proxy"}]
            pod = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "sglang-0", "namespace": "inference"}}
            self.answer(200, json.dumps({**pod, "spec": {"containers": containers}}), "application/json")
        elif url.path in ("/api", "/apis"):
            kind = {
                "/api": {"kind": "APIVersions", "versions": ["v1"]},
                "/apis": {"kind": "APIGroupList", "groups": []},
            }
            self.answer(200, json.dumps(kind[url.path]), "application/json")
        elif url.path == "/api/v1":
            pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get"]}
            found = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods]}
            self.answer(200, json.dumps(found), "application/json")
        else:
            self.refuse(404, 'pods "gone" not found')

    def log(self, query: dict[str, list[str]]) -> str:
        kept = LINES
        if "sinceTime" in query:
            kept = [line for line in kept if parse_time(line[0]) >= parse_time(query["sinceTime"][0])]
        if "tailLines" in query:
            kept = kept[-int(query["tailLines"][0]) :]
        stamped = query.get("timestamps") == ["true"] or query.get("timestamps") == ["True"]
        return "".join(f"{when} {text}\n" if stamped else f"{text}\n" for when, text in kept)

    def refuse(self, status: int, message: str) -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
        reason = {400: "BadRequest", 403: "Forbidden", 404: "NotFound"}[status]
        self.answer(status, json.dumps({**body, "reason": reason}), "application/json")

    def answer(self, status: int, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A loopback API server; the answer is the kubeconfig that leads to it."""
    Cluster.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield str(kubeconfig(tmp_path, server.server_port))
    server.shutdown()
    thread.join()
    server.server_close()


def kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig.json"  # YAML is a superset of JSON
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
WHOLE = PodLogQuery("inference", "sglang-0", container="engine", tail=None)


def lines_of(wanted: PodLogQuery, config: str) -> list[str]:
    return list(read_pod_log(replace(wanted, kubeconfig=config)))


@needs_kubectl
def test_the_whole_log_arrives_as_it_was_written(cluster: str) -> None:
    assert lines_of(WHOLE, cluster) == [text for _, text in LINES]


@needs_kubectl
def test_since_time_is_exact_and_leaves_no_time_stamps(cluster: str) -> None:
    wanted = PodLogQuery("inference", "sglang-0", "engine", None, since_time=parse_time("2026-06-22T18:00:00Z"))
    assert lines_of(wanted, cluster) == [text for _, text in LINES[1:]]


@needs_kubectl
def test_tail_gives_the_last_lines(cluster: str) -> None:
    assert lines_of(PodLogQuery("inference", "sglang-0", "engine", 2), cluster) == [text for _, text in LINES[-2:]]
    assert Cluster.asked[-1]["tailLines"] == ["2"]


@needs_kubectl
def test_a_duration_becomes_seconds(cluster: str) -> None:
    lines_of(PodLogQuery("inference", "sglang-0", "engine", None, since_s=5400.0), cluster)
    assert Cluster.asked[-1]["sinceSeconds"] == ["5400"]


@needs_kubectl
@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        (PodLogQuery("inference", "gone", "engine"), "not found", "check --namespace, --pod"),
        (PodLogQuery("secret", "sglang-0", "engine"), "forbidden", "pods/log"),
        (PodLogQuery("inference", "sglang-0", "nope"), "nope is not valid", "--container"),
    ],
)
def test_a_refusal_of_the_cluster_is_one_line_with_a_hint(
    cluster: str, wanted: PodLogQuery, message: str, hint: str
) -> None:
    with pytest.raises(InputError) as refusal:
        lines_of(wanted, cluster)
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message
    assert hint in refusal.value.hint


@needs_kubectl
def test_a_cluster_that_is_not_there_is_one_line_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="refused") as refusal:
        lines_of(WHOLE, str(kubeconfig(tmp_path, 9)))
    assert "\n" not in refusal.value.message
    assert "connection" in refusal.value.hint


# -- a shim in kubectl's place -------------------------------------------------------------------------------------


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script named kubectl that writes down its arguments and prints what the test put beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(
        f"#!{sys.executable}\nimport json, pathlib, sys\nhere = pathlib.Path(__file__).parent\n"
        "(here / 'arguments.json').write_text(json.dumps(sys.argv[1:]))\n"
        "sys.stdout.buffer.write((here / 'stdout').read_bytes())\n"
        "sys.stderr.write((here / 'stderr').read_text())\n"
        "sys.exit(int((here / 'code').read_text()))\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (folder / "stdout").write_bytes("".join(text + "\n" for _, text in LINES[1:]).encode() + b"\xff not text\n")
    (folder / "stderr").write_text("")
    (folder / "code").write_text("0")
    monkeypatch.setenv("PATH", str(folder))
    return folder


COLLECT = ["collect-k8s-engine-events", "--engine", "sglang", "--namespace", "inference", "--pod", "sglang-0"]


def collect(tmp_path: Path, *more: str) -> int:
    outputs = ["--output-log", str(tmp_path / "r" / "sglang.log"), "--output-summary", str(tmp_path / "r" / "s.json")]
    return main([*COLLECT, *outputs, *more])


def test_the_command_of_the_readme_writes_log_and_summary(
    tmp_path: Path, shim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path, "--since-time", "2026-06-22T18:00:00Z") == 0
    asked = json.loads((shim / "arguments.json").read_text())
    assert asked == [
        "--namespace", "inference", "logs", "pod/sglang-0", "--tail=-1", "--since-time=2026-06-22T18:00:00Z"
    ]  # fmt: skip
    summary = json.loads((tmp_path / "r" / "s.json").read_text())
    assert (summary["donor_registrations"], summary["semantic_hits"], summary["materialized_tokens"]) == (1, 1, 96)
    assert (tmp_path / "r" / "sglang.log").read_text().splitlines()[:3] == [text for _, text in LINES[1:]]
    assert json.loads(capsys.readouterr().out)["materialized_tokens"] == 96


def test_a_log_that_fills_the_tail_may_be_cut_and_says_so(
    tmp_path: Path, shim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path, "--tail", "4", "--container", "engine") == 0
    assert "older ones may be cut" in capsys.readouterr().err
    assert json.loads((shim / "arguments.json").read_text())[4:] == ["--tail=4", "--container", "engine"]
    assert collect(tmp_path) == 0
    assert "--tail=2000" in json.loads((shim / "arguments.json").read_text())


def test_a_failure_leaves_the_files_of_the_last_good_run(
    tmp_path: Path, shim: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect(tmp_path) == 0
    good = (tmp_path / "r" / "sglang.log").read_text()
    (shim / "code").write_text("1")
    (shim / "stderr").write_text('Error from server (NotFound): pods "sglang-0" not found\n')
    assert collect(tmp_path) == 2
    said = capsys.readouterr().err
    assert 'error: cannot read the log of pod inference/sglang-0: pods "sglang-0" not found\n' in said
    assert "hint: check --namespace, --pod and --context" in said
    assert (tmp_path / "r" / "sglang.log").read_text() == good


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--since", "yesterday"], "--since 'yesterday' is no duration"),
        (["--since-time", "2026-06-22 18:00"], "is no RFC 3339 time"),
        (["--since-time", "2026-06-22T18:00:00"], "is no RFC 3339 time"),
        (["--since", "5m", "--since-time", "2026-06-22T18:00:00Z"], "both given"),
        (["--tail", "0"], "--tail 0 asks for no line"),
        (["--container", "-x"], "expected one argument"),
        (["--container=--all"], "--container '--all' is no name"),
        (["--timeout-seconds", "0"], "not positive"),
    ],
)
def test_a_wrong_flag_is_told_before_anything_runs(
    tmp_path: Path, shim: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert collect(tmp_path, *flags) == 2
    assert message in capsys.readouterr().err
    assert not (shim / "arguments.json").exists()


@pytest.mark.parametrize("client", ["auto", "python", "kubectl"])
def test_old_scripts_that_choose_a_client_still_run(tmp_path: Path, shim: Path, client: str) -> None:
    assert collect(tmp_path, "--client", client) == 0
    assert json.loads((shim / "arguments.json").read_text())[:3] == ["--namespace", "inference", "logs"]


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ('Error from server (Forbidden): pods "sglang-0" is forbidden: User "me" ...', "is forbidden", "pods/log"),
        ("Error from server (BadRequest): container nope is not valid for pod x", "nope is not valid", "--container"),
        ("error: a container name must be specified for pod x", "a container name must be", "--container"),
        ("log line\nThe connection to the server 127.0.0.1:9 was refused", "was refused", "connection"),
        ("", "no reason given", "by hand"),
    ],
)
def test_a_refusal_is_one_line_whose_hint_fits(shim: Path, said: str, message: str, hint: str) -> None:
    (shim / "code").write_text("1")
    (shim / "stderr").write_text(said)
    with pytest.raises(InputError) as refusal:
        list(read_pod_log(WHOLE))
    assert message in refusal.value.message
    assert "\n" not in refusal.value.message
    assert hint in refusal.value.hint


def test_without_kubectl_the_hint_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError) as missing:
        list(read_pod_log(WHOLE))
    assert "kubectl" in missing.value.hint


def test_every_wish_becomes_a_word_of_its_own() -> None:
    wanted = PodLogQuery(
        "n s", "p;rm", "c", 7, since_time=datetime.fromisoformat("2026-06-22T20:00:00+02:00"), previous=True,
        context="x", kubeconfig="k",
    )  # fmt: skip
    assert build_command(wanted) == [
        "kubectl", "--namespace", "n s", "logs", "pod/p;rm", "--tail=7", "--container", "c",
        "--since-time=2026-06-22T18:00:00Z", "--previous", "--context", "x", "--kubeconfig", "k",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("1h30m", 5400.0), ("1.5h", 5400.0)])
def test_durations_are_read_as_kubectl_reads_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds
