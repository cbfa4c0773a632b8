"""The estimate moves the passages of a log exactly as a server moves those of the same requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace
from semblend.arrange import Arranger
from semblend.engine.server.service import PromptArranger
from semblend.errors import InputError
from semblend.estimate.steps import ArrangePassages
from semblend.text.chat import render_chat
from semblend.text.logs import LoggedPrompt, PromptLog
from semblend.text.parts import join_parts, split_parts
from semblend.wire.chat import ChatRequest
from semblend.wire.errors import ApiError

TEXTS = st.sampled_from([f"{name} is a port with ferries" for name in "abcdef"] + ["", "é", "e\u0301"])
SCORES = st.sampled_from([0, 0.5, 3])
CACHE_TOKENS = 16  # two passages: what was sent before them is stale


def part(text: str, group: str | None, score: float | None) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": "text", "text": text}
    if group is None:
        return plain
    return plain | {"semblend": {"commutes": group} | ({} if score is None else {"score": score})}


@st.composite
def messages(draw: st.DrawFn, *, scored: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": draw(st.sampled_from(["Be kind.", "Be brief."]))}]
    for role in draw(st.sampled_from([["user"], ["user", "assistant", "user"], ["user", "user"]])):
        if draw(st.booleans()):
            found.append({"role": role, "content": draw(TEXTS)})
            continue
        groups = draw(st.lists(st.sampled_from([None, "docs", "docs", "examples"]), min_size=1, max_size=6))
        parts = [part(draw(TEXTS), group, draw(SCORES) if scored else None) for group in groups]
        found.append({"role": role, "content": parts})
    return found


KEEPS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {}, optional={"first": st.integers(0, 2), "last": st.integers(0, 2), "within": st.none() | st.integers(0, 3)}
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    scored = draw(st.booleans())
    ours: dict[str, Any] = {}
    if draw(st.booleans()):
        listed = draw(st.lists(TEXTS, max_size=5))
        ours = {"passages": listed} | ({"scores": [draw(SCORES) for _ in listed]} if scored else {})
    if draw(st.booleans()):
        ours["keep"] = draw(KEEPS) | ({"displaced": 0.2} if scored and draw(st.booleans()) else {})
    if draw(st.sampled_from([False, False, False, True])):
        ours["reuse"] = False
    body = {"messages": draw(messages(scored=scored)), "user": draw(st.sampled_from(["ann", "bob"]))}
    return body | ({"semblend": ours} if ours else {}) | ({"cache_salt": "s"} if draw(st.booleans()) else {})


def read_log(path: Path, bodies: list[Any]) -> list[LoggedPrompt]:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return list(PromptLog(str(path)))


@settings(max_examples=50, deadline=None)
@given(bodies=st.lists(requests(), min_size=1, max_size=12))
def test_the_same_requests_are_put_into_the_same_order(
    bodies: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, step = PromptArranger(Arranger.for_cache(CACHE_TOKENS)), ArrangePassages(CACHE_TOKENS)
    logged = read_log(tmp_path_factory.getbasetemp() / "log.jsonl", bodies)
    for number, (body, prompt) in enumerate(zip(bodies, logged, strict=True)):
        asked = ChatRequest.parse(json.dumps(body), most_n=1)
        namespace = Namespace(tenant=prompt.tenant, salt=prompt.salt)
        arranged = server.arrange(asked, namespace)
        server.record(str(number), arranged.sent)
        parts = split_parts(prompt.parts, "marked")
        sent = step.apply(parts, namespace, prompt.keep) if prompt.reuse else parts
        assert join_parts(sent) == render_chat(list(arranged.asked.messages))


ODD = st.sampled_from([None, True, -1, 0, 1, 1025, 1e10, 0.5, "", "x", "x" * 65, [], ["a", "b"], [1, 2], {}, {"x": 1}])


MARKS = ODD | st.fixed_dictionaries({"commutes": ODD}, optional={"score": ODD})
KEEPS_ODDLY = ODD | st.fixed_dictionaries({}, optional={"first": ODD, "within": ODD, "displaced": ODD})
OURS = ODD | st.fixed_dictionaries({}, optional={"passages": ODD, "scores": ODD, "reuse": ODD, "keep": KEEPS_ODDLY})


@settings(max_examples=100, deadline=None)
@given(odd=st.tuples(MARKS, st.none()) | st.tuples(st.none(), OURS))
def test_what_a_server_refuses_is_a_malformed_line_and_nothing_else(
    odd: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    mark, ours = odd
    parts = [{"type": "text", "text": "a", "semblend": mark}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}], "semblend": ours}

    def is_served() -> bool:
        try:
            ChatRequest.parse(json.dumps(body), most_n=1)
        except ApiError:
            return False
        return True

    def is_read() -> bool:
        try:
            read_log(tmp_path_factory.getbasetemp() / "odd.jsonl", [body])
        except InputError:
            return False
        return True

    assert is_read() == is_served()
