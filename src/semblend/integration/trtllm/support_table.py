"""Which models and features of TensorRT-LLM are served, and what of it was checked: tables for the docs."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.integration.version_support import Feature, Served

_TESTS = "tests/integration/trtllm"
_CONNECTOR = f"{_TESTS}/test_connector.py"
_INTERFACE = f"{_TESTS}/test_interface.py"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "Llama, Qwen2 and Qwen3 with full attention, PyTorch backend",
        Served.YES,
        "on the fake engine only. Weights and KV cache in float32, bfloat16 or float16",
        _CONNECTOR,
    ),
    Feature(
        "requests with a salt of their own",
        Served.YES,
        "`cache_salt` from `make_one_time_salt(tenant)`: nobody else finds their blocks in the reuse tree",
        _CONNECTOR,
    ),
    Feature(
        "requests with another salt, or none",
        Served.PER_REQUEST,
        "computed; they become donors. With `enable_block_reuse: false` they are served too, by versions that ask a "
        "connector then",
        _CONNECTOR,
    ),
    Feature(
        "requests for which the engine has found a prefix of its own",
        Served.PER_REQUEST,
        "its blocks are not known before the claim",
        _CONNECTOR,
    ),
    Feature("chunked prefill", Served.YES, "on the fake engine only", _CONNECTOR),
    Feature("tensor parallel", Served.NO, "a rank cannot answer before the claim is made", _INTERFACE),
    Feature("pipeline parallel, attention DP, context parallel", Served.NO, "no rank has a whole prompt", _INTERFACE),
    Feature("quantised weights or KV cache", Served.NO, "the twin computes plain numbers only", _INTERFACE),
    Feature("speculative decoding", Served.NO, "a draft model has KV of its own, which donors do not hold", _INTERFACE),
    Feature("LoRA", Served.NO, "an adapter changes what tokens compute, and the twin has none", _INTERFACE),
    Feature("sliding windows", Served.NO, "not every token has a block", _INTERFACE),
    Feature("disaggregated serving", Served.NO, "other engines would take approximate KV as exact", _INTERFACE),
    Feature("beam search", Served.NO, "beams share blocks of a prompt", _INTERFACE),
    Feature(
        "images, prompt embeddings, context logits",
        Served.PER_REQUEST,
        "computed without us",
        _INTERFACE,
    ),
    Feature("engines built with the TensorRT backend", Served.NO, "they have no Python connector"),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One row of what was checked. ``how`` says by what, or what it would take."""

    what: str
    checked: bool
    how: str


CHECKS: tuple[Check, ...] = (
    Check("hooks, parameters and abstract methods of both base classes", True, "published sources; test_interface.py"),
    Check("both places of the module that TensorRT-LLM has had", True, "test_interface.py"),
    Check("order of the hooks in a step, metadata that is sent to workers", True, "published sources; the fake engine"),
    Check("documents moved, answers near cold ones, receipts that add up", True, "the fake engine, float32, a CPU"),
    Check("both orders of tokens and heads in a block", True, "the fake engine; a first prompt decides"),
    Check("nothing approximate under a key that two requests can have", True, "the fake engine's reuse tree"),
    Check("failures before the claim cost reuse, failures behind it fail the step", True, "the fake engine"),
    Check("a twin that computes something else is found out", True, "the fake engine with other weights"),
    Check("the launcher's options file", True, "its content only"),
    Check("parameter names of the real models", False, "read in published sources; a missing one is refused by name"),
    Check("that a connector is asked where `enable_block_reuse` is off", False, "some versions do not ask"),
    Check("that `cache_salt` is readable when a connector is asked", False, "some versions show a number: declined"),
    Check("streams and overlap of the real executor", False, "needs a GPU and TensorRT-LLM"),
    Check("speed, of anything", False, "needs a GPU and TensorRT-LLM"),
    Check("that the real engine starts with this connector at all", False, "needs a GPU and TensorRT-LLM"),
)
