"""An SGLang that nobody has looked at, or none at all: one sentence with what to do next, and none of it imported."""

from __future__ import annotations

import logging
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from semblend.errors import SemBlendError
from semblend.integration.sglang import launcher, plugin
from semblend.integration.sglang.radix_patcher import patch_radix_cache
from semblend.integration.versions import SGLANG

KNOWN = [row.version for row in SGLANG.rows]
UNKNOWN = ["0.4.9", "0.5.20", "0.5.22", "0.5.24", "0.5.23.post1", "0.6.0", "1.0"]


@pytest.fixture(params=[*UNKNOWN, None], ids=lambda version: version or "none")
def unknown(request, tmp_path, monkeypatch):
    """An environment with another release of SGLang, whose modules say that they were imported; or without any."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    if request.param is not None:
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").write_text("raise AssertionError('SGLang was imported')")
        facts = tmp_path / f"sglang-{request.param}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {request.param}\n")
        monkeypatch.syspath_prepend(tmp_path)
    elif any(Path(folder, "sglang").is_dir() for folder in sys.path if folder):
        pytest.skip("SGLang is installed here")
    return request.param


def assert_it_says_what_to_do(said: str, version: str | None) -> None:
    if version is None:
        assert "SGLang is not installed" in said
        assert "semblend-suite[sglang]" in said
    else:
        assert f"SGLang {version} " in said
        assert all(known in said for known in KNOWN)
    assert "Traceback" not in said


def test_the_launcher_refuses_it_before_anything_starts(unknown, capsys):
    with pytest.raises(SystemExit) as stopped:
        launcher.main(["--model-path", "m"], start=lambda command: pytest.fail("it was started"))
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["error", "hint"]
    assert_it_says_what_to_do(said.err, unknown)


def test_the_plugin_logs_one_sentence_and_stays_out_of_the_way(unknown, caplog):
    with caplog.at_level(logging.WARNING, "sglang.semblend"):
        plugin.register()
    (record,) = caplog.records
    assert_it_says_what_to_do(record.getMessage(), unknown)
    assert "\n" not in record.getMessage()


def test_patching_it_is_refused_with_a_hint(unknown):
    with pytest.raises(SemBlendError) as refused:
        patch_radix_cache()
    assert_it_says_what_to_do(str(refused.value), unknown)
    assert refused.value.hint


def test_the_extra_asks_for_the_releases_that_are_known():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (asked,) = project["optional-dependencies"]["sglang"]
    versions = Requirement(asked).specifier
    assert all(versions.contains(version) for version in KNOWN)
    assert not any(versions.contains(version) for version in UNKNOWN)
