"""Agents that edit their history in batches: against the embedded server, and inside LangChain's agent."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import httpx
import pytest
from live_server import run_server
from small_models import Characters, draw_tokens, make_small_model

from semblend.arrange import EditOutcome, HistoryEditor
from semblend.config import SemBlendConfig
from semblend.facade import SemBlend

BLOCK_TOKENS = 16
WORDS = "the flight to Seattle leaves at nine and costs ninety dollars without a bag "


@contextmanager
def serve_small_model():
    pytest.importorskip("torch", reason="the engine needs torch")
    from semblend.engine.core.assemble import assemble
    from semblend.engine.core.config import EngineConfig
    from semblend.engine.server.local_engine import LocalEngine

    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    model = make_small_model(vocab_size=128, max_position_embeddings=8192)
    config = EngineConfig(model_name="tiny", quality="fast")
    engine = LocalEngine(
        assemble(model, pool_tokens=16384, semblend=library, config=config, detokenizer=Characters()), Characters()
    )
    engine.start()
    try:
        with run_server(engine) as live, httpx.Client(base_url=live.url, timeout=300) as client:
            yield client
    finally:
        engine.close()


def ask(client, messages, reuse):
    """What an agent reads of an answer: its text, the tokens of its prompt, and the receipt."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "semblend": {"reuse": reuse}}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens"], told["semblend"]


def run_agent(client, editor, steps, *, reuse):
    """What became of each step: the edited history, the tokens of its prompt, its receipt."""
    client.post("/flush_cache")
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find the cheapest flight."}]
    for step in range(steps):
        found = editor.edit(history)
        answer, tokens, receipt = ask(client, found.messages, reuse)
        yield found, tokens, receipt
        result = "".join(chr(32 + token) for token in draw_tokens(300, step))
        history += [{"role": "assistant", "content": f"{answer} look({step})"}, {"role": "tool", "content": result}]


def test_steps_between_edits_extend_the_last_prompt_and_an_edited_step_reuses_moved_kv():
    editor = HistoryEditor(budget_tokens=2400, count=lambda one: len(one["content"]))
    with serve_small_model() as client:
        cached = list(run_agent(client, editor, 14, reuse=False))
        moved = list(run_agent(client, editor, 9, reuse=True))
    assert [at for at, (found, _, _) in enumerate(cached) if found.outcome is EditOutcome.EDITED] == [8, 12]
    for (before, past, _), (found, tokens, receipt) in pairwise(cached):
        if found.outcome is EditOutcome.EDITED:
            assert receipt["exact_tokens"] < 0.3 * tokens, "what a prefix cache alone has of an edited prompt"
        else:
            assert found.messages[: len(before.messages)] == before.messages
            assert receipt["exact_tokens"] > past - 2 * BLOCK_TOKENS
    found, _, receipt = moved[-1]
    behind = sum(len(one["content"]) for one in found.messages[found.edit.removals[-1].end : -2])
    assert receipt["reused_tokens"] > 0.75 * behind, f"{receipt} of {behind}"


class TestLangChain:
    @pytest.fixture
    def agents(self):
        pytest.importorskip("langchain.agents", reason="langchain is not installed")
        return pytest.importorskip("semblend.integration.langchain_agents")

    @pytest.fixture
    def model(self):
        """A model that calls one tool after the other, and keeps what it was asked."""
        from langchain_core.language_models import BaseChatModel
        from langchain_core.messages import AIMessage
        from langchain_core.outputs import ChatGeneration, ChatResult

        class Caller(BaseChatModel):
            rounds: int = 12
            asked: list
            settings: list

            @property
            def _llm_type(self):
                return "caller"

            def bind_tools(self, tools, **kwargs):
                return self.bind(**kwargs)

            def _generate(self, messages, stop=None, run_manager=None, **kwargs):
                number = len(self.asked)
                self.asked.append(messages)
                self.settings.append(kwargs)
                calls = [{"name": "find", "args": {"number": number}, "id": f"c{number}"}]
                answer = AIMessage(
                    "" if number < self.rounds else "Done.",
                    tool_calls=calls if number < self.rounds else [],
                    response_metadata={"id": f"chatcmpl-{number}"},
                    additional_kwargs={"reasoning_content": "Hm. " * 20},
                )
                return ChatResult(generations=[ChatGeneration(message=answer)])

        return Caller(asked=[], settings=[])

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_an_agent_sends_edited_prompts_and_keeps_its_whole_history(self, agents, model, asynchronous):
        import asyncio

        from langchain.agents import create_agent

        edits = []
        editor = HistoryEditor(budget_tokens=3000)
        middleware = agents.EditHistory(editor, on_edit=edits.append, declare=True)
        agent = create_agent(model, [find], system_prompt="Be brief.", middleware=[middleware])
        asked = {"messages": [("user", "Find the cheapest flight.")]}
        state = asyncio.run(agent.ainvoke(asked)) if asynchronous else agent.invoke(asked)
        results = [one for one in state["messages"] if one.type == "tool"]
        assert len(results) == 12
        assert all(WORDS in one.content for one in results), "the state keeps every result"
        assert len(model.asked) == 13
        assert len(edits) == 2
        changed = [at for at, (a, b) in enumerate(pairwise(model.asked)) if b[: len(a)] != a]
        assert len(changed) == 2, "all other prompts extend the one before them"
        for edit, at in zip(edits, changed, strict=True):
            assert edit.base == f"chatcmpl-{at}"
            assert model.settings[at + 1]["extra_body"] == {
                "kv_transfer_params": {"semblend": {"edit": edit.to_dict()}}
            }
            for one in edit.to_dict()["ranges"]:
                assert model.asked[at][one["start"]].type in ("ai", "tool"), "places count the system message"
        last = [one.content == editor.placeholder for one in model.asked[-1] if one.type == "tool"]
        assert last == [True] * 9 + [False] * 3
        thinking = [bool(one.additional_kwargs) for one in model.asked[-1] if one.type == "ai"]
        assert thinking == [False] * 9 + [True] * 3
        assert all(one.tool_calls for one in model.asked[-1] if one.type == "ai")

    def test_a_request_within_the_budget_is_passed_on_as_it_is(self, agents, model):
        from langchain.agents.middleware.types import ModelRequest
        from langchain_core.messages import HumanMessage

        request = ModelRequest(model=model, messages=[HumanMessage("Hi")])
        assert agents.EditHistory().shorten(request) is request


def find(number: int) -> str:
    """Find flights."""
    return f"{number}: " + WORDS * 20
