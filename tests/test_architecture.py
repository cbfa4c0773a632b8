"""The house stays as drawn: imports point down, heavy dependencies stay home, one reader of the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# Bottom up. A module may import from its own layer and from those before it.
LAYERS = [
    {"errors", "_version"},
    {"formatting"},
    {"web"},
    {"name_clash", "config", "prompt", "span", "extras", "fairness", "quality", "kv_shapes", "prices"},
    {"fingerprint"},
    {"eviction"},
    {"discover"},
    {"align"},
    {"plan"},
    {"confirm"},
    {"pipeline"},
    {"explanation", "reporting"},
    {"facade"},
    {"arrange"},
    {""},  # semblend/__init__
    {"text", "wire", "models"},
    {"http"},
    {"materialize"},
    {"session"},
    {"engine", "integration"},
    {"estimate", "explorer", "demo"},
    {"cli"},
    {"__main__"},
]
# confirm, fingerprint's evidence side and plan speak of plans as values: that module is everyone's vocabulary.
VOCABULARY = {"plan.reuse_plan"}
PACKAGES = ["semblend", "semantickv", "sembench"]  # bottom up

HEAVY = {
    "numba": {"*.kernels"},
    "torch": {"materialize.*", "session.*", "engine.*", "demo.runner", "integration.*"},
    "triton": {"*.kernels", "materialize.kv.attention_kernels"},
    "transformers": {"integration.transformers.*"},
    "vllm": {"integration.vllm.*"},
    "sglang": {"integration.sglang.*"},
    "dynamo": {"integration.dynamo.*"},
    "gguf": {"engine.model.*"},
    "langchain": {"integration.langchain_agents"},
    "langchain_core": {"integration.langchain", "integration.langchain_agents"},
    "llama_index": {"integration.llama_index"},
    "sentence_transformers": set(),
    "onnxruntime": {"fingerprint.*"},
    "onnx": set(),
    "tokenizers": {"fingerprint.*", "text.tokenization", "engine.model.tokenizer"},
    "safetensors": {"fingerprint.*", "engine.model.*"},
    "usearch": {"discover.similarity"},
    "prometheus_client": {"confirm.metrics", "engine.server.exposition"},
    "opentelemetry": {"confirm.tracing"},
    "nats": {"confirm.nats_sink"},
    "fastapi": {"engine.server.*"},
    "pydantic": {"wire.*", "engine.server.*"},
    "uvicorn": {"http.*"},
    "huggingface_hub": {"fingerprint.*", "engine.model.*", "models", "text.tokenization"},
    "httpx": set(),
    "matplotlib": {"web.plotting"},
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((SRC / package).rglob("*.py")):
        parts = path.relative_to(SRC / package).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


@cache
def read_nodes(path: Path) -> tuple[tuple[ast.AST, bool], ...]:
    """The imports of a file and its words for the environment, each with whether it stands at the top of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
    ]
    return tuple((node, node in tree.body) for node in found)


def imports(path: Path, *, top_only: bool = False) -> Iterator[tuple[str, int]]:
    for node, is_top in read_nodes(path):
        if top_only and not is_top:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def layer_of(module: str) -> int:
    head = module.split(".")[0]
    for height, names in enumerate(LAYERS):
        if head in names:
            return height
    raise AssertionError(f"semblend.{module} stands in no layer: add it to LAYERS")


SEMBLEND = dict(modules("semblend"))


@pytest.mark.parametrize("module", SEMBLEND)
def test_imports_point_down(module):
    for name, line in imports(SEMBLEND[module]):
        if not name.startswith("semblend."):
            continue
        target = name.removeprefix("semblend.")
        if any(target == word or target.startswith(word + ".") for word in VOCABULARY) or target == "plan":
            continue
        if target not in SEMBLEND and target.rpartition(".")[0] in SEMBLEND:
            target = target.rpartition(".")[0]
        if target.split(".")[0] in {name for names in LAYERS for name in names}:
            assert layer_of(target) <= layer_of(module), f"semblend.{module}:{line} imports upwards: {name}"


ENGINES = ("dynamo", "sglang", "transformers", "trtllm", "vllm")


@pytest.mark.parametrize("module", [name for name in SEMBLEND if name.startswith("integration.")])
def test_an_engine_takes_nothing_from_another_engines_integration(module):
    """What two engines need stands below them: in integration itself, or lower."""
    own = module.split(".")[1]
    for name, line in imports(SEMBLEND[module]):
        others = [f"semblend.integration.{engine}" for engine in ENGINES if engine != own]
        assert not any((name + ".").startswith(other + ".") for other in others), f"semblend.{module}:{line}: {name}"


@pytest.mark.parametrize("module", [name for name in SEMBLEND if name.startswith("session")])
def test_a_session_knows_no_engine(module):
    text = SEMBLEND[module].read_text().lower()
    assert not [name for name in (*ENGINES, "tensorrt", "embedded") if name in text.replace("transformers'", "")]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_point_down(package):
    above = PACKAGES[PACKAGES.index(package) + 1 :]
    for module, path in modules(package):
        for name, line in imports(path):
            assert name.split(".")[0] not in above, f"{package}.{module}:{line} imports {name}"


@pytest.mark.parametrize("module", SEMBLEND)
def test_heavy_dependencies_stay_home(module):
    for name, line in imports(SEMBLEND[module]):
        homes = HEAVY.get(name.split(".")[0])
        if homes is not None:
            assert any(Path(module).match(home) for home in homes), f"semblend.{module}:{line} imports {name}"


@pytest.mark.parametrize("module", SEMBLEND)
def test_heavy_dependencies_and_kernels_are_imported_late(module):
    if module.endswith("kernels"):
        return
    at_home = (
        {"torch"}
        if module.startswith(("materialize.", "session.", "engine.", "demo.runner", "integration."))
        else set()
    )  # about tensors
    if module.startswith(("engine.server.", "wire.")):
        at_home |= {"fastapi", "pydantic"}
    if module == "http.protocol":  # the server imports it when it serves
        at_home |= {"uvicorn"}
    if module in (
        "integration.vllm.connector_v1",
        "integration.vllm.multi_connector",
        "integration.vllm.offload_policy",
        "integration.vllm.offload_spec",
    ):  # vLLM imports them, nobody else
        at_home |= {"vllm"}
    if module in (
        "integration.sglang.radix_backend",
        "integration.sglang.hicache.page_storage",
    ):  # SGLang asks for them, nobody else
        at_home |= {"sglang"}
    if module in ("integration.langchain", "integration.langchain_agents", "integration.llama_index"):
        at_home |= {"langchain", "langchain_core", "llama_index"}  # whoever has that package imports them
    if module == "integration.transformers.reuse":  # a cache is a class of theirs
        at_home |= {"transformers"}
    for name, line in imports(SEMBLEND[module], top_only=True):
        assert name.split(".")[0] not in HEAVY.keys() - at_home, f"semblend.{module}:{line} imports {name} at the top"
        assert not name.endswith("kernels"), f"semblend.{module}:{line} imports kernels at the top"


@pytest.mark.parametrize(
    ("package", "reader"), [("semblend", "config"), ("semantickv", "settings"), ("sembench", "settings")]
)
def test_only_the_settings_read_the_environment(package, reader):
    readers = {
        f"{package}.{module}:{node.lineno}"
        for module, path in modules(package)
        if module != reader
        for node, _ in read_nodes(path)
        if isinstance(node, ast.Attribute)
    }
    assert not readers


def targets(path: Path, known: Collection[str]) -> set[str]:
    """The modules that a file imports; of ``from package import module`` the module alone."""
    found = set()
    for node, _ in read_nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & set(known)) | ({node.module or ""} if full - set(known) else set())
    return found & set(known)


def graph(*, by_folder: bool = False) -> dict[str, set[str]]:
    """Who imports whom, late imports counted. By folder: between siblings, whichever of their modules imports."""
    known = {f"{package}.{name}".rstrip("."): path for package in PACKAGES for name, path in modules(package)}
    edges: dict[str, set[str]] = {name: set() for name in known}
    for module, path in known.items():
        for target in sorted(targets(path, known) - {module}):
            if not by_folder:
                edges[module].add(target)
                continue
            mine, theirs = module.split("."), target.split(".")
            apart = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if apart:  # not 0: packages have a test of their own
                edges.setdefault(".".join(mine[: apart + 1]), set()).add(".".join(theirs[: apart + 1]))
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in edges:
        seen, todo = set(), list(edges[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += edges.get(name, ())
        reached[start] = seen
    return [sorted(n for n in reached[name] if name in reached.get(n, ())) for name in edges if name in reached[name]]


def test_no_import_runs_in_a_circle():
    assert not circles(graph())


def test_folders_beside_each_other_do_not_import_each_other():
    edges = graph(by_folder=True)
    pairs = sorted((a, b) for a, targets in edges.items() for b in targets if a < b and a in edges.get(b, ()))
    assert not pairs


def test_the_search_for_circles_finds_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]] * 3


def test_importing_semblend_loads_nothing_heavy():
    script = "import sys, semblend; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & (set(HEAVY) | {"asyncio", "http", "requests"})


def test_the_library_works_where_numba_is_absent():
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba' else find(name, *rest)\n"
        "from semblend import Prompt, SemBlend\n"
        "sb = SemBlend(); sb.register(Prompt(range(500)), donor_id='a')\n"
        "print(sb.lookup(Prompt(range(100, 400))).reused_tokens)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "300"
