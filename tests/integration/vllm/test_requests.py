"""What a request asks of us, who else may say it, and whose donors it sees."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from semblend import Namespace
from semblend.integration.vllm.scheduler.records import (
    build_namespace,
    explain_decline,
    read_options,
)
from semblend.prompt import name_tenant
from semblend.quality import RequestOptions


def hint(payload, action_type="semblend.reuse"):
    return SimpleNamespace(action_id="1", action_type=action_type, action_version="1", payload=payload)


def request(own=None, *hints, salt=None, **rest):
    return SimpleNamespace(
        kv_transfer_params=None if own is None else {"semblend": own},
        kv_hints=SimpleNamespace(protocol_version="1", message_id="m", actions=list(hints)) if hints else None,
        cache_salt=salt,
        lora_request=None,
        **rest,
    )


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (request(), RequestOptions()),
        (request({"quality": "fast"}), RequestOptions(quality="fast")),
        (request(None, hint({"quality": "fast"})), RequestOptions(quality="fast")),
        (request({"quality": "balanced"}, hint({"quality": "fast"})), RequestOptions(quality="balanced")),
        (request(None, hint({"quality": "fast"}), hint({"quality": "exact"})), RequestOptions(quality="exact")),
        (request({"quality": "fast"}, hint({"opt_out": True})), RequestOptions(True, "fast")),
        (request({"opt_out": True}, hint({"opt_out": False})), RequestOptions(opt_out=True)),
        (request(None, hint({"opt_out": True}, "somebody.else")), RequestOptions()),
        (request({"quality": 0.05}, hint({"quality": "fast"})), RequestOptions(quality="0.05")),
        (request({"quality": "1e9x"}, hint({"quality": 0})), RequestOptions(quality="exact")),
        (request({"quality": -1}, hint({"quality": "fast"})), RequestOptions(quality="exact")),
        (request(None, hint({"quality": "nan"})), RequestOptions(quality="exact")),
        (request({"quality": "superb", "opt_out": "yes"}, hint(None)), RequestOptions(True, "exact")),
        (request(None, hint("nonsense")), RequestOptions(quality="exact")),
        (request({"opt_out": 0, "quality": True}), RequestOptions(True, "exact")),
        (request({"quality": ["fast"]}), RequestOptions(quality="exact")),
        (request("fast"), RequestOptions(quality="exact")),
        (SimpleNamespace(), RequestOptions()),
    ],
)
def test_the_request_decides_its_mode_then_the_last_hint_and_either_may_opt_out(asked, options):
    assert read_options(asked) == options


def test_a_tenant_is_the_salt_and_cannot_be_read_from_its_name():
    namespaces = [build_namespace(request(salt=salt), Namespace(model="m")) for salt in (None, "", "a", "b")]
    assert [space.salt for space in namespaces] == ["", "", "a", "b"]
    assert len({space.tenant for space in namespaces}) == 3
    assert namespaces[2].tenant == name_tenant("a")
    assert len(name_tenant("a")) == 16
    assert "secret" not in name_tenant("secret")
    assert name_tenant("\ud800"), "a salt is text, whatever text"


@pytest.mark.parametrize("salt", [None, ""])
def test_where_a_salt_is_wanted_a_request_without_one_is_computed_without_us(salt):
    plain = request(salt=salt, mm_features=[])
    assert "cache_salt" in explain_decline(plain, require_cache_salt=True)
    assert explain_decline(plain) is None
    assert explain_decline(request(salt="mine", mm_features=[]), require_cache_salt=True) is None


def test_nothing_of_a_namespace_is_shared_by_two_salts():
    one, other = (build_namespace(request(salt=salt), Namespace(model="m")) for salt in ("a", "b"))
    assert one.digest != other.digest
    assert dataclasses.replace(one, salt="", tenant="") == dataclasses.replace(other, salt="", tenant="")
