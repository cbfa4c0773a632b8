"""deploy/: Kubernetes' own schemas accept the manifests, hadolint the images; what one file names another one has.

Nothing is built or applied.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from semantickv import cli as semantickv_cli
from semantickv.settings import VARIABLES
from semblend import __version__
from semblend.cli import main as semblend_cli
from semblend.config import SETTINGS

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

DEPLOY = Path(__file__).parents[1] / "deploy"
VERSIONS = ("1.31", "1.34")


def read_objects() -> list[tuple[str, dict]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [(path.name, found) for path in files for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


OBJECTS = read_objects()
NAMES = [f"{file}: {one['kind']} {one['metadata']['name']}" for file, one in OBJECTS]


def find(kind: str, name: str) -> dict:
    return next(one for _, one in OBJECTS if one["kind"] == kind and one["metadata"]["name"] == name)


def list_containers() -> list[dict]:
    made = [one["spec"]["template"]["spec"] for _, one in OBJECTS if one["kind"] in ("Deployment", "StatefulSet")]
    return [container for spec in made for container in spec["containers"]]


def read_env(container: dict) -> dict[str, dict]:
    return {one["name"]: one for one in container.get("env", ())}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", [one for _, one in OBJECTS], ids=NAMES)
def test_kubernetes_own_schema_accepts_it(found, version):
    kubernetes_validate.validate(found, version, strict=True)


def test_the_check_can_fail():
    broken = json.loads(json.dumps(find("Deployment", "router")))
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_every_selector_selects_something():
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for _, one in OBJECTS
        if one["kind"] in ("Deployment", "StatefulSet")
    ]
    for _, one in OBJECTS:
        spec = one.get("spec", {})
        if one["kind"] == "Service":
            assert spec["selector"] in labels
        elif one["kind"] == "NetworkPolicy":
            sources = [source["podSelector"] for rule in spec["ingress"] for source in rule["from"]]
            assert all(selector["matchLabels"] in labels for selector in (spec["podSelector"], *sources))
        elif one["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            assert spec["selector"]["matchLabels"] in labels


def test_the_router_knows_every_engine_by_a_name_that_it_has():
    engines, service = find("StatefulSet", "engine"), find("Service", "engines")
    assert engines["spec"]["serviceName"] == service["metadata"]["name"]
    env = read_env(find("Deployment", "router")["spec"]["template"]["spec"]["containers"][0])
    expected = [f"engine-{n}.engines" for n in range(engines["spec"]["replicas"])]
    assert env["SEMANTICKV_REPLICAS"]["value"].split(",") == [f"http://{name}:8000" for name in expected]
    events = [f"tcp://{name}:5557|tcp://{name}:5558" for name in expected]
    assert env["SEMANTICKV_KV_EVENTS"]["value"].split(",") == events


@pytest.mark.parametrize("path", ["deploy/kubernetes/README.md", "docs/guides/kubernetes.md"])
def test_no_page_applies_the_example_of_the_secrets(path):
    lines = [line for line in (DEPLOY.parent / path).read_text("utf-8").splitlines() if line.startswith("kubectl")]
    named = [name for line in lines for name in re.findall(r"-f (\S+)", line)]
    assert len(named) == 6
    assert not any((DEPLOY.parent / name).is_dir() or "example" in name for name in named)


def test_every_variable_and_secret_is_one_that_exists():
    known = {*VARIABLES, *(setting.variable for setting in SETTINGS)}
    keys = find("Secret", "semblend-keys")["stringData"]
    for container in list_containers():
        for name, one in read_env(container).items():
            assert name in known
            if "valueFrom" in one:
                assert one["valueFrom"]["secretKeyRef"]["key"] in keys
    assert all(value == "replace-me" for value in keys.values())


def read_connector(words: list[str]) -> dict:
    joined = next(word for word in words if "kv_connector_module_path" in word)
    return json.loads(joined.removeprefix("--kv-transfer-config="))


def test_every_engine_loads_our_connector():
    stack = yaml.safe_load((DEPLOY / "production-stack" / "values.yaml").read_text(encoding="utf-8"))
    patch = yaml.safe_load((DEPLOY / "llm-d" / "engine-patch.yaml").read_text(encoding="utf-8"))
    listed = [
        find("StatefulSet", "engine")["spec"]["template"]["spec"]["containers"][0]["args"],
        stack["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["extraArgs"],
        patch["spec"]["template"]["spec"]["containers"][0]["args"],
    ]
    for words in listed:
        assert read_connector(words) == {
            "kv_connector": "SemBlendConnectorV1",
            "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
            "kv_role": "kv_both",
        }


IMAGES = sorted(DEPLOY.rglob("Dockerfile*"))
PARSERS = {"semblend": semblend_cli.build_parser, "semantickv": semantickv_cli.build_parser}


def read_image(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with what follows each."""
    lines = [line.partition(" ") for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in lines]


def is_sent(name: str) -> bool:
    """Whether .dockerignore lets a path of the checkout into an image: the last pattern that names it decides."""
    lines = [line for line in (DEPLOY.parent / ".dockerignore").read_text("utf-8").splitlines() if line[:1] != "#"]
    sent = True
    for line in lines:
        if line.removeprefix("!") in ("*", name):
            sent = line.startswith("!")
    return sent


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path):
    done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_copies_what_is_there_and_what_a_build_needs(path):
    copied = [name for word, rest in read_image(path) if word == "COPY" for name in rest.split()[:-1]]
    for name in copied:
        assert (DEPLOY.parent / name).exists()
        assert name == "." or is_sent(name), f"{name} is in .dockerignore"
    needed = ("pyproject.toml", "README.md", "LICENSE", "src")
    assert all("." in copied or name in copied for name in needed)
    assert all(is_sent(name) for name in needed)


def test_an_image_does_not_take_an_environment_or_the_history_along():
    assert not any(is_sent(name) for name in (".git", ".venv", ".engines", "bench", "build"))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_extra_that_an_image_installs_exists(path):
    wanted = re.findall(r"\[([\w,-]+)\]['\"]", " ".join(rest for word, rest in read_image(path) if word == "RUN"))
    declared = (DEPLOY.parent / "pyproject.toml").read_text("utf-8")
    assert wanted
    assert all(re.search(rf"^{extra} = \[", declared, re.MULTILINE) for one in wanted for extra in one.split(","))


def list_started() -> list[list[str]]:
    """The commands of ours that an image or a container starts, with the arguments that the manifest adds."""
    started = [
        json.loads(rest) for path in IMAGES for word, rest in read_image(path) if word in ("CMD", "ENTRYPOINT")
    ]  # fmt: skip
    router = next(one for one in started if one[:2] == ["semantickv", "router"])
    added = find("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]["args"]
    return [*started, router + added, ["semblend", "models", "pull", "smollm2-135m"]]


@pytest.mark.parametrize("words", list_started(), ids=" ".join)
def test_what_a_container_starts_is_a_command_with_flags_that_exist(words):
    program, *rest = words
    found = vars(PARSERS[program]().parse_args(rest))
    assert found["command"] == rest[0]


def test_the_ports_of_probes_and_services_are_those_that_the_router_opens():
    router = find("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    words = next(one for one in list_started() if one[:2] == ["semantickv", "router"])
    assert {one["containerPort"] for one in router["ports"]} == {int(words[words.index("--port") + 1])}


def test_an_image_is_named_by_the_version_of_this_checkout():
    texts = [path.read_text("utf-8") for path in DEPLOY.rglob("*.yaml")]
    texts.append((DEPLOY.parent / "docs" / "guides" / "kubernetes.md").read_text("utf-8"))
    tags = [tag for text in texts for tag in re.findall(r"semblend-(?:engine|router):(\S+)", text)]
    assert len(tags) > 3
    assert set(tags) == {__version__}


def test_the_workflow_runs_what_ci_runs() -> None:
    import yaml

    root = Path(__file__).parents[1]
    jobs = yaml.safe_load((root / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    engines = jobs["engines"]["strategy"]["matrix"]["engine"]
    ran = {*steps, *(f".ci/engines/{engine}" for engine in engines)}
    wanted = [re.split(r" #| \|\|", line)[0].strip() for line in (root / ".ci" / "run").read_text("utf-8").splitlines()]
    assert {line for line in wanted if line.startswith(("make ", ".ci/engines/"))} <= ran
