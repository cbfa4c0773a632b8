"""Prompts to calibrate on: a target, the prompts that came before it, and what they share, found by the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from semblend.config import SemBlendConfig
from semblend.demo.runner import Encodes
from semblend.demo.workloads import Workload
from semblend.facade import SemBlend
from semblend.materialize.calibrate import CalibrationPrompt
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.span import Span
from semblend.text.logs import LoggedPrompt

MIN_TOKENS = 32
_CONFIG = SemBlendConfig(embedder="none", metrics=False)


def of_workloads(workloads: Iterable[Workload], tokenizer: Encodes) -> Iterator[CalibrationPrompt]:
    """The demo's own prompts."""
    for workload in workloads:
        with SemBlend(_CONFIG) as library:
            for number, donor in enumerate(workload.donors):
                library.register(Prompt(tokenizer.encode_chat(donor)), donor_id=str(number))
            found = _prompt(library, Prompt(tokenizer.encode_chat(workload.prompt)))
        if found is not None:
            yield found


def of_log(
    log: Iterable[LoggedPrompt], encode: Callable[[str], Iterable[int]], *, max_tokens: int, vocab: int
) -> Iterator[CalibrationPrompt]:
    """Logged prompts in order, each with those before it; tenants stay apart, and too long ones are left out."""
    with SemBlend(_CONFIG) as library:
        for logged in log:
            ids = logged.token_ids if logged.token_ids is not None else list(encode(logged.text or ""))
            if not 0 < len(ids) <= max_tokens or int(max(ids)) >= vocab:
                continue
            prompt = Prompt(ids, namespace=Namespace(tenant=logged.tenant))
            found = _prompt(library, prompt)
            if found is not None:
                yield found
            library.register(prompt, donor_id=f"line-{logged.line}")


def _prompt(library: SemBlend, prompt: Prompt) -> CalibrationPrompt | None:
    """None where donors hold nothing but what an exact prefix cache would serve: that KV needs no gate."""
    plan = library.lookup(prompt)
    if not isinstance(plan, ReusePlan):
        return None
    spans = [span for span in plan.spans if span.target_start or span.donor_start]
    if sum(span.length for span in spans) < MIN_TOKENS:
        return None
    names = list(dict.fromkeys(span.donor_id for span in spans))
    tokens = {name: library.donor_tokens(name) for name in names}
    return CalibrationPrompt(
        _tuple(prompt.token_ids),
        tuple(_tuple(held) for held in tokens.values() if held is not None),
        tuple(_number_spans(span, names) for span in spans),
    )


def _number_spans(span: Span, names: list[str]) -> Span:
    return replace(span, donor_id=str(names.index(span.donor_id)), generation=0)


def _tuple(tokens: TokenArray) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)
