"""What is said before a router joins a deployment: what is missing, and what cannot be right."""

from __future__ import annotations

import importlib.util

import pytest

from semantickv.cli import main
from semblend.errors import ConfigError, MissingDependencyError
from semblend.integration.dynamo.serve import RouterOptions, read_version
from semblend.integration.dynamo.versions import SUPPORTED, support
from semblend.integration.version_support import VersionEvidence

no_dynamo = pytest.mark.skipif(importlib.util.find_spec("dynamo") is not None, reason="Dynamo is installed here")


@no_dynamo
def test_without_dynamo_the_router_says_what_to_install(capsys):
    with pytest.raises(MissingDependencyError, match="Dynamo is not installed"):
        read_version()
    assert main(["dynamo-router", "--model-name", "m", "--model-path", "/nowhere"]) == 2
    assert "hint: pip install 'semblend-suite[dynamo]'" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--endpoint", "backend"], ["--block-size", "0"]])
def test_what_cannot_be_right_is_one_line_and_a_hint(flags, capsys):
    assert main(["dynamo-router", "--model-name", "m", "--model-path", "/nowhere", *flags]) == 2
    assert "hint: " in capsys.readouterr().err


def test_help_needs_no_dynamo(capsys):
    assert main(["dynamo-router", "--help"]) == 0
    assert main(["dynamo-pin", "--help"]) == 0
    assert "--frontend" in capsys.readouterr().out


def test_a_frontend_that_is_no_address_is_refused(capsys):
    assert main(["dynamo-pin", "--frontend", "nonsense"]) == 2
    assert "hint: " in capsys.readouterr().err


def test_the_router_serves_in_the_namespace_of_its_workers():
    assert RouterOptions("m", "/m", "prod.vllm.generate").component == "prod.semblend_router"
    with pytest.raises(ConfigError, match="no endpoint"):
        RouterOptions("m", "/m", "prod.vllm")


def test_a_version_that_nobody_has_looked_at_says_so():
    assert support("9.9").evidence is VersionEvidence.NONE
    assert SUPPORTED[0].version in support("9.9").note
