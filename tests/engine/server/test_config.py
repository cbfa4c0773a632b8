"""One settings object for serving: one set of defaults, and one place where requests are admitted."""

from __future__ import annotations

import pytest

from semblend.cli.main import build_parser
from semblend.engine.core.config import EngineConfig
from semblend.engine.server.config import ServeConfig
from semblend.errors import ConfigError


def test_the_flags_the_server_and_the_engine_have_the_same_defaults():
    flags, server, engine = build_parser(["serve"]).parse_args(["serve"]), ServeConfig(), EngineConfig()
    for name in ("max_running", "max_waiting", "step_tokens"):
        assert getattr(flags, name) == getattr(server, name) == getattr(engine, name)
    for name in ("pool_tokens", "donor_host_bytes", "donor_disk_bytes", "donor_dir", "device", "dtype"):
        assert getattr(flags, name) == getattr(server, name)


def test_the_engine_never_refuses_an_answer_of_a_request_that_was_admitted():
    config = ServeConfig(max_running=5, max_n=3, max_waiting=0)
    assert config.engine_config(quality="fast").max_waiting >= config.max_running * config.max_n


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"threads": -1}, {"pool_tokens": 0}, {"donor_host_bytes": -1}])
def test_what_cannot_be_served_is_refused_where_the_settings_are_made(wrong):
    with pytest.raises(ConfigError) as caught:
        ServeConfig(**wrong)
    assert next(iter(wrong)) in caught.value.message
    assert caught.value.hint
