"""What is said before a router joins a deployment: what is missing, and what cannot be right."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from semantickv.cli import build_parser, main
from semblend.errors import ConfigError, MissingDependencyError
from semblend.integration.dynamo.serve import RouterOptions, read_version
from semblend.integration.versions import DYNAMO
from tools.reference.semblend_pages import commands_of, options_of

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
    assert not DYNAMO.find("9.9").is_known
    assert DYNAMO.rows[0].version in DYNAMO.find("9.9").note


PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "dynamo.md").read_text("utf-8")
WORKERS = re.findall(r"^.*python -m dynamo\.vllm .*$", PAGE, re.MULTILINE)


def test_every_worker_of_the_guide_publishes_its_events_and_two_of_one_machine_at_two_ports():
    told = [json.loads(shlex.split(line)[shlex.split(line).index("--kv-events-config") + 1]) for line in WORKERS]
    assert len(told) == 3
    assert all(one["enable_kv_cache_events"] for one in told)
    assert told[0]["endpoint"] != told[1]["endpoint"]


def test_the_guide_says_what_brings_the_engine_of_a_worker():
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
        if "dynamo.vllm" in block:
            assert "pip install 'ai-dynamo[vllm]==1.6.1'" in block


@pytest.mark.parametrize("command", ["dynamo-router", "dynamo-pin"])
def test_the_guide_names_every_flag_that_is_the_commands_own(command):
    shared = {"--host", "--port", "--drain", "--drain-seconds", "--tls-cert", "--tls-key", "--debug", "-h", "--help"}
    flags = {name for option in options_of(commands_of(build_parser())[command]) for name in option.option_strings}
    assert {name for name in flags - shared if name not in PAGE} == set()


def test_an_endpoint_as_dynamo_writes_it_is_understood(monkeypatch):
    seen = []
    monkeypatch.setattr("semblend.integration.dynamo.serve.read_version", lambda: "Dynamo")
    monkeypatch.setattr("semblend.integration.dynamo.serve.run_router", lambda options, *_: seen.append(options))
    flags = ["--model-name", "m", "--model-path", "p", "--endpoint", "dyn://prod.backend.generate"]
    assert main(["dynamo-router", *flags]) == 0
    assert (seen[0].endpoint, seen[0].component) == ("prod.backend.generate", "prod.semblend_router")
