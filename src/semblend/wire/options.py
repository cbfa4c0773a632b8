"""The options that all endpoints share, read from a request's body: how to draw the answer and how to reuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semblend.config import QUALITY_MODES
from semblend.wire.fields import Fields, show
from semblend.wire.sampling import LEAST_PENALTY, Sampling

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_BIASES = 1024
MOST_TOKENS = 1 << 20
_SEEDS = 2**63 - 1

# Options that this engine does not have, and the values that ask for nothing. Anything else is refused: an option
# that is silently dropped would make an answer look like something that it is not.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "suffix": ("",),
    "echo": (False,),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "json_schema": (),
    "ebnf": (),
    "lora_path": (),
    "image_data": (),
    "input_embeds": (),
    "prompt_embeds": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOptions:
    """What one request asks of reuse: a quality mode of its own, or none at all. ``salt`` narrows its namespace."""

    quality: str | None = None
    reuse: bool = True
    salt: str = ""


def parse_reuse(fields: Fields) -> ReuseOptions:
    """From ``semblend: {"quality": ..., "reuse": ...}`` and ``cache_salt`` of the body.

    >>> parse_reuse(Fields({"semblend": {"quality": "fast"}})).quality
    'fast'
    """
    salt = fields.text("cache_salt", longest=256)
    ours = fields.child("semblend")
    if ours is None:
        return ReuseOptions(salt=salt)
    quality = ours.text("quality") or None
    if quality is not None and quality not in QUALITY_MODES:
        ours.refuse("quality", f"is {show(quality)}", "one of " + ", ".join(QUALITY_MODES))
    return ReuseOptions(quality=quality, reuse=ours.flag("reuse", True), salt=salt)


def refuse_absent_options(fields: Fields) -> None:
    """400 for what this engine cannot do, unless the value asks for nothing."""
    for name, neutral in _ABSENT.items():
        value = fields.raw(name)
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
            continue
        if name in ("tool_choice", "function_call") and not fields.has("tools") and not fields.has("functions"):
            continue  # without tools there is nothing to choose
        fields.refuse(name, f"is not supported (got {show(value)})", f"leave {name} out")


def parse_sampling(fields: Fields, *, max_tokens: int | None, logprobs: int | None, most_n: int) -> Sampling:
    """The sampling fields that chat and completions name alike."""
    n = fields.integer("n", 1, 1, most_n) or 1
    best_of = fields.integer("best_of", n, 1, most_n)
    if best_of != n:
        fields.refuse("best_of", f"is {best_of} while n is {n}", "leave best_of out")
    top_k = fields.integer("top_k", 0, -1, MOST_TOKENS) or 0
    return Sampling(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=_top_p(fields),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, LEAST_PENALTY, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        logit_bias=_biases(fields),
        seed=fields.integer("seed", None, -_SEEDS - 1, _SEEDS),
        stop=fields.texts("stop", MOST_STOPS),
        stop_token_ids=fields.token_ids("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        n=n,
        logprobs=logprobs,
    )


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, 0.0, 1.0)
    if value == 0.0:
        problem = "is 0, which leaves no token to draw: temperature 0 takes the likeliest token"
        fields.refuse("top_p", problem, "leave it out for 1.0")
    return value


def _biases(fields: Fields) -> tuple[tuple[int, float], ...]:
    """``{"token id": bias}``; JSON has only strings as keys."""
    given = fields.raw("logit_bias")
    if given is None:
        return ()
    if not isinstance(given, dict):
        fields.refuse("logit_bias", f"is {show(given)}, not an object", 'send {"token id": bias}')
    if len(given) > MOST_BIASES:
        fields.refuse("logit_bias", f"has {len(given)} entries, more than {MOST_BIASES}", "send fewer")
    biases = Fields(given, fields.path("logit_bias."))
    found = []
    for name in given:
        # isdecimal knows digits of every script; a token id has ours
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) < 2**31):
            fields.refuse("logit_bias", f"names the token {show(name)}", "keys are token ids in decimal digits")
        found.append((int(name), biases.number(name, 0.0, -100.0, 100.0)))
    return tuple(found)
