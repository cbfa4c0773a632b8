"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from semblend import ConfigError, MissingDependencyError, SemBlend, SemBlendConfig, load_config
from semblend.config import SETTINGS, setting_sources


def test_a_file_then_the_environment_then_arguments(tmp_path):
    file = tmp_path / "semblend.toml"
    file.write_text("[semblend]\nmax_donors = 1\nmin_similarity = 0.1\nquality = 'fast'\n")
    environ = {"SEMBLEND_CONFIG": str(file), "SEMBLEND_MAX_DONORS": "2", "SEMBLEND_MIN_SIMILARITY": "0.2"}
    config = load_config(environ, max_donors=3)
    assert (config.max_donors, config.min_similarity, config.quality) == (3, 0.2, "fast")
    sources = setting_sources(environ)
    assert sources["max_donors"] == "SEMBLEND_MAX_DONORS"
    assert sources["quality"] == str(file)
    assert sources["enabled"] == "default"


def test_a_file_without_a_section_is_read_too(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("max_donors = 7\n")
    assert load_config({}, file=file).max_donors == 7


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_switches_are_read_as_people_write_them(text, value):
    assert load_config({"SEMBLEND_DISCOVERY_ONLY": text}).discovery_only is value


DOCUMENTED = {
    "SEMBLEND_ENABLED": ("0", "enabled", False),
    "SEMBLEND_MIN_SIMILARITY": ("0.75", "min_similarity", 0.75),
    "SEMBLEND_EMBEDDER": ("jaccard", "embedder", "jaccard"),
    "SEMBLEND_FUZZY_CHUNKS": ("1", "fuzzy_chunks", True),
    "SEMBLEND_DISCOVERY_ONLY": ("1", "discovery_only", True),
    "SEMBLEND_STRICT_PREFIX_BOUNDARY": ("0", "strict_prefix_boundary", False),
    "SEMBLEND_EXACT_MATERIALIZATION_ONLY": ("1", "exact_materialization_only", True),
    "SEMBLEND_QUALITY": ("fast", "quality", "fast"),
    "SEMBLEND_MIN_REUSE_RATIO": ("0.5", "min_reuse_ratio", 0.5),
}


@pytest.mark.parametrize("variable", DOCUMENTED)
def test_every_documented_variable_is_read(variable):
    text, name, value = DOCUMENTED[variable]
    assert getattr(load_config({variable: text}), name) == value


def test_documented_defaults():
    config = load_config({})
    assert config.enabled
    assert config.min_similarity == 0.60
    assert not config.fuzzy_chunks
    assert not config.discovery_only
    assert config.strict_prefix_boundary
    assert config.exact_materialization_only


BAD = {
    "SEMBLEND_ENABLED": "perhaps",
    "SEMBLEND_MIN_SIMILARITY": "2",
    "SEMBLEND_EMBEDDER": "word2vec",
    "SEMBLEND_QUALITY": "best",
    "SEMBLEND_MAX_DONORS": "many",
    "SEMBLEND_MAX_BYTES": "1",
    "SEMBLEND_MIN_REUSE_RATIO": "nan",
    "SEMBLEND_LOOKUP_BUDGET_MS": "-1",
    "SEMBLEND_EXACT_MATERIALIZATION_ONLY": "0",
    "SEMBLEND_MIN_SPAN_TOKENS": "2",
}


@pytest.mark.parametrize("variable", BAD)
def test_a_value_out_of_its_range_names_itself_and_a_hint(variable):
    with pytest.raises(ConfigError) as caught:
        load_config({variable: BAD[variable]})
    assert variable.removeprefix("SEMBLEND_").lower() in str(caught.value).lower()
    assert caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", ["max_donors = ", "unknown = 1", "semblend = 3", "max_donors = 'x'", None])
def test_a_bad_file_is_refused_with_a_hint(tmp_path, content):
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config({}, file=file)
    assert caught.value.hint


def test_an_unknown_argument_is_refused():
    with pytest.raises(ConfigError, match="unknown setting 'max_doners'"):
        load_config({}, max_doners=3)


def test_settings_are_frozen_and_all_have_help():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SemBlendConfig().max_donors = 3  # type: ignore[misc]
    assert all(setting.help.endswith(".") or setting.help for setting in SETTINGS)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)


def test_a_named_embedder_whose_model_is_missing_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("semblend.fingerprint.embedder.find_minilm", lambda *_: None, raising=False)
    from semblend.fingerprint.embedder import describe_embedders

    available = {row.name: row.available for row in describe_embedders(tmp_path)}
    if available.get("static"):
        pytest.skip("the static model is installed here")
    with pytest.raises(MissingDependencyError) as caught:
        SemBlend(SemBlendConfig(embedder="static", models=str(tmp_path)))
    assert caught.value.hint


@pytest.mark.parametrize("said", ["acme,bolt", "acme, bolt", "true", "ALL", "1", "'acme'", "acme;bolt"])
def test_a_forget_that_names_no_tenant_is_refused_and_not_passed_over(said):
    with pytest.raises(ConfigError, match="names no tenant"):
        SemBlendConfig(forget=said)
