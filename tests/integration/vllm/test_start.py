"""Whether an engine can be served, as far as no vLLM is needed to ask."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from semblend.integration.vllm import startup_checks as start
from semblend.integration.vllm.startup_checks import in_multi_connector, load_failure_policy, may_queue_loads, refusal
from semblend.integration.vllm.versions import SUPPORTED, VersionEvidence, support


def made_by(module, name="MultiConnector"):
    """What a part learns when an object of this class makes it, two calls up."""

    def make(self):
        return (lambda: in_multi_connector())()

    return type(name, (), {"__module__": module, "make": make})().make()


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", True),
        ("semblend.integration.vllm.multi_connector", False),
        ("vllm_of_somebody_else", False),
    ],
)
def test_a_multi_connector_of_vllm_is_found_among_the_callers(module, refused):
    assert made_by(module) is refused


def test_another_owner_among_the_callers_is_no_multi_connector():
    assert not made_by("vllm.v1.core.sched.scheduler", "Scheduler")
    assert not in_multi_connector()


def test_every_known_version_says_how_it_is_known():
    versions = [row.version for row in SUPPORTED]
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert all(row.evidence is VersionEvidence.RUN and row.note for row in SUPPORTED)
    assert support("0.19.0").evidence is VersionEvidence.NONE
    assert "never looked at" in support("0.19.0").note


class FullAttentionSpec(SimpleNamespace):
    """Known by its name."""


class MLAAttentionSpec(SimpleNamespace):
    """Another kind."""


def engine(attention=None, **changes):
    """A plain engine, as far as it is asked; ``changes`` by dotted names with __ for the dot."""
    config = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1
        ),
        lora_config=None,
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: config)),
    )
    for name, value in changes.items():
        *way, last = name.split("__")
        owner = made
        for step in way:
            owner = getattr(owner, step)
        setattr(owner, last, value)
    group = SimpleNamespace(kv_cache_spec=attention or FullAttentionSpec())
    return made, SimpleNamespace(kv_cache_groups=[group])


def why_not(*made, version="0.32.0"):
    return refusal(*made, version, Path("vllm"))


@pytest.fixture
def known_sources(monkeypatch):
    monkeypatch.setattr(start, "missing", lambda package: ())


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_engine_is_served(ranks):
    assert why_not(*engine(parallel_config__tensor_parallel_size=ranks)) is None


@pytest.mark.usefixtures("known_sources")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"parallel_config__data_parallel_size": 2}, "data parallel"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallel"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "draft"),
        ({"cache_config__cache_dtype": "fp8"}, "fp8"),
        ({"attention": MLAAttentionSpec()}, "full attention"),
        ({"attention": FullAttentionSpec(sliding_window=512)}, "full attention"),
    ],
)
def test_an_engine_that_we_cannot_serve_is_told_why(changes, words):
    assert words in why_not(*engine(**changes))


def test_an_unknown_version_and_changed_sources_are_refused(monkeypatch):
    assert "never looked at" in why_not(*engine(), version="0.99.0")
    monkeypatch.setattr(start, "missing", lambda package: ("Request.update_block_hashes is not in v1/request.py",))
    assert "update_block_hashes" in why_not(*engine())


def scheduling(device="cuda", in_advance=False, runner_v2=False):
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(async_scheduling=in_advance),
        use_v2_model_runner=runner_v2,
    )


@pytest.mark.parametrize(
    ("config", "queues", "policy"),
    [
        (scheduling(), True, "recompute"),
        (scheduling(device="cpu"), False, "recompute"),
        (scheduling(in_advance=True), False, "fail"),
        (scheduling(in_advance=None), False, "fail"),
        (scheduling(runner_v2=True), False, "fail"),
        (SimpleNamespace(scheduler_config=SimpleNamespace()), False, "fail"),
    ],
)
def test_a_verdict_comes_late_only_where_vllm_recovers_from_it(config, queues, policy):
    assert may_queue_loads(config) is queues
    assert load_failure_policy(config) == policy
