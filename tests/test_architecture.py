"""The house stays as drawn: imports point down, heavy dependencies stay home, one reader of the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# Bottom up. A module may import from its own layer and from those before it.
LAYERS = [
    {"errors", "_version"},
    {"_foreign", "config", "prompt", "span"},
    {"commandline", "plotting"},
    {"fingerprint"},
    {"discover"},
    {"align"},
    {"plan"},
    {"confirm"},
    {"pipeline"},
    {"explanation", "evidence", "reporting"},
    {"facade"},
    {""},  # semblend/__init__
    {"tokenization", "chat", "logs", "wire"},
    {"materialize", "models"},
    {"engine", "integration"},
    {"estimate", "explorer", "demo"},
    {"commands"},
    {"cli"},
    {"reference", "command_page", "__main__"},
]
# confirm, fingerprint's evidence side and plan speak of plans as values: that module is everyone's vocabulary.
VOCABULARY = {"plan.reuse_plan"}
PACKAGES = ["semblend", "semantickv", "sembench"]  # bottom up

HEAVY = {
    "numba": {"*.kernels"},
    "torch": {"fingerprint.embedder_models", "materialize.*", "engine.*", "demo.runner", "integration.*"},
    "triton": {"*.kernels", "materialize.attention_kernels", "materialize.mass_kernels"},
    "transformers": set(),
    "vllm": {"integration.vllm.*"},
    "gguf": {"engine.*"},
    "sentence_transformers": {"fingerprint.embedder_models"},
    "onnxruntime": {"fingerprint.*"},
    "onnx": set(),
    "tokenizers": {"fingerprint.*", "tokenization", "engine.tokenizer"},
    "safetensors": {"fingerprint.*", "engine.*"},
    "usearch": {"discover.vector_index"},
    "prometheus_client": {"confirm.metrics", "engine.exposition"},
    "opentelemetry": {"confirm.tracing"},
    "nats": {"confirm.nats_sink"},
    "fastapi": {"engine.server", "engine.*"},
    "pydantic": {"wire.*", "engine.server"},
    "uvicorn": {"engine.*", "commands.serve"},
    "huggingface_hub": {"fingerprint.*", "engine.*", "models", "tokenization"},
    "httpx": set(),
    "matplotlib": {"demo.plot"},
}


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((SRC / package).rglob("*.py")):
        parts = path.relative_to(SRC / package).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def imports(path: Path, *, top_only: bool = False) -> Iterator[tuple[str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    for node in nodes:
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
        {"torch"} if module.startswith(("materialize.", "engine.", "demo.runner", "integration.")) else set()
    )  # about tensors
    if module.startswith(("engine.server", "wire.")):
        at_home |= {"fastapi", "pydantic"}
    if module in ("integration.vllm.connector_v1", "integration.vllm.beside_others"):  # vLLM imports them, nobody else
        at_home |= {"vllm"}
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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert not readers


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_and_functions_stay_short(package):
    for module, path in modules(package):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 420, f"{package}.{module} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno
                assert length <= 90, f"{package}.{module}.{node.name} has {length} lines"


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
