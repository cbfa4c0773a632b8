"""A quality is a mode or a number of nats, spelled in one way; requests go before tenants, tenants before servers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.config import SemBlendConfig, load_config
from semblend.errors import ConfigError, InputError
from semblend.quality import (
    choose_quality,
    find_path,
    parse_quality,
    parse_tenant_qualities,
    read_nats,
    read_request_options,
)
from semblend.session.sessions import choose_mode

GARBAGE = ["", "1e9x", "nan", "inf", "-1", "-0.1", "1_000", "0x1", "½", "٠.٥", ".", "e5", "Fast", "0,05", "9" * 5000,
           math.nan, math.inf, -math.inf, -1, True, None, [], {}, 10**400, b"fast"]  # fmt: skip


@pytest.mark.parametrize("value", GARBAGE, ids=lambda value: repr(value)[:20])
def test_garbage_is_refused_with_a_hint_and_a_short_message(value):
    with pytest.raises(InputError) as refused:
        parse_quality(value)
    assert "balanced" in refused.value.hint
    assert len(refused.value.message) < 120


@given(st.floats(0, 1e6, allow_nan=False) | st.sampled_from(["exact", "fast", "balanced"]))
def test_a_quality_has_one_spelling_that_says_its_number(value):
    spelled = parse_quality(value)
    assert parse_quality(spelled) == spelled
    assert find_path(spelled) in ("exact", "fast", "balanced")
    if isinstance(value, float):
        assert read_nats(spelled) == pytest.approx(value, rel=1e-5)


def test_the_modes_are_points_of_the_scale():
    assert [parse_quality(one) for one in (0, "0", 0.0, "0.020")] == ["exact", "exact", "exact", "balanced"]
    assert [read_nats(one) for one in ("exact", "balanced", "fast")] == [0.0, 0.02, math.inf]
    assert [find_path(one) for one in ("0.05", "1e-09")] == ["balanced", "balanced"]


def test_a_request_goes_before_its_tenant_and_a_tenant_before_the_server():
    config = SemBlendConfig(quality="fast", tenant_quality="acme=0.05 bolt=exact")
    assert config.find_tenant_quality("acme") == "0.05"
    assert config.find_tenant_quality("nobody") is None
    assert choose_quality(None, None, config.quality) == "fast"
    assert choose_quality(None, config.find_tenant_quality("bolt"), config.quality) == "exact"
    assert choose_quality("0.3", config.find_tenant_quality("bolt"), config.quality) == "0.3"


@pytest.mark.parametrize("text", ["acme", "=0.05", "acme=", "acme=1e9x", "acme=0.1 acme=0.2", "acme=-1"])
def test_wrong_qualities_of_tenants_are_refused_when_the_server_starts(text):
    with pytest.raises(ConfigError) as refused:
        SemBlendConfig(tenant_quality=text)
    assert refused.value.hint
    with pytest.raises(InputError):
        parse_tenant_qualities(text)


def test_a_setting_may_be_a_number_wherever_it_comes_from(tmp_path):
    file = tmp_path / "semblend.toml"
    file.write_text("quality = 0.05\n")
    assert load_config({}, file).quality == "0.05"
    assert load_config({"SEMBLEND_QUALITY": " 0.1 "}).quality == "0.1"
    assert load_config({}, quality=0).quality == "exact"
    for wrong in ("often", "-0.1", "inf"):
        with pytest.raises(ConfigError, match="nats"):
            load_config({"SEMBLEND_QUALITY": wrong})


def test_a_tenant_that_has_to_forget_is_exact_whatever_its_requests_ask() -> None:
    config = SemBlendConfig(quality="fast", tenant_quality="acme=0.05", forget="acme bolt")
    assert [choose_mode(config, asked, "acme") for asked in (None, "fast", "0.3")] == ["exact"] * 3
    assert choose_mode(config, "0.3", "bolt") == "exact"
    assert choose_mode(config, None, "other") == "fast"
    assert choose_mode(SemBlendConfig(quality="fast", forget="*"), "fast", "") == "exact"


@pytest.mark.parametrize("said", [True, "yes", 1, {}, "false"])
def test_a_wish_to_forget_that_cannot_be_read_is_one(said: object) -> None:
    found = read_request_options({"quality": "fast", "forget": said})
    assert (found.quality, found.forget) == ("exact", True)
    assert read_request_options({"quality": "fast", "forget": False}).quality == "fast"
