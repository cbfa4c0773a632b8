"""What `from semblend import …` promises."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["semblend", "semantickv", "sembench"])
def test_all_is_what_is_exported(package):
    module = importlib.import_module(package)
    assert sorted(module.__all__) == module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_public_name_has_a_docstring():
    semblend = importlib.import_module("semblend")
    for name in semblend.__all__:
        thing = getattr(semblend, name)
        if callable(thing):
            assert thing.__doc__, name


def test_the_words_of_the_specification_are_there():
    from semblend import Decline, SemBlend, Span

    assert Decline.__match_args__[:2] == ("reason", "detail")
    assert Span.__match_args__[:4] == ("donor_id", "donor_start", "target_start", "length")
    for name in ("register", "lookup", "forget", "explain", "from_env", "claim", "confirm", "warm_up"):
        assert callable(getattr(SemBlend, name))


def test_the_engine_contract_is_public_and_every_part_of_it_is_explained():
    contract = importlib.import_module("semblend.materialize.contract")
    assert {"Capabilities", "Layout", "Model", "Observer", "Rows"} <= set(contract.__all__)
    for name in contract.__all__:
        thing = getattr(contract, name)
        assert not callable(thing) or thing.__doc__, name


@pytest.mark.parametrize(
    "path",
    [
        "semblend.integration.vllm.connector_v1:SemBlendConnectorV1",
        "semblend.integration.vllm.multi_connector:MultiConnector",
        "semblend.integration.vllm.beside_others:MultiConnector",
    ],
)
def test_paths_that_stand_in_peoples_command_lines_lead_to_a_class(path):
    """Read from the source: vLLM, whose classes these extend, is not installed here."""
    module, _, name = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    names |= {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert name in names
