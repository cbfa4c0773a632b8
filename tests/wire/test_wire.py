"""Over the wire with a real engine of a small random model: sampling options, several prompts, receipts, any JSON."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("fastapi", reason="the server needs fastapi")
httpx = pytest.importorskip("httpx", reason="the tests need httpx")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from semblend import SemBlend, SemBlendConfig  # noqa: E402
from semblend.confirm.outcome import Outcome  # noqa: E402
from semblend.confirm.receipt import Receipt  # noqa: E402
from semblend.engine.core.assemble import assemble  # noqa: E402
from semblend.engine.core.config import EngineConfig  # noqa: E402
from semblend.engine.core.stops import NoText  # noqa: E402
from semblend.engine.model.model import DecoderModel  # noqa: E402
from semblend.engine.model.sampling import Draw, make_generator, sample  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.dashboard import LiveRequest  # noqa: E402
from semblend.engine.server.local_engine import LocalEngine  # noqa: E402
from semblend.engine.server.routes import create_app  # noqa: E402
from semblend.errors import SemBlendError  # noqa: E402
from semblend.plan.reuse_plan import DeclineReason  # noqa: E402
from semblend.span import Span  # noqa: E402
from semblend.wire.answer import MAX_RUNS, describe_receipt  # noqa: E402
from semblend.wire.sampling import Sampling  # noqa: E402

SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
PATHS = ("/v1/chat/completions", "/v1/completions", "/generate")
OURS = {
    "outcome", "mode", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens", "recomputed", "donors",
    "risk", "escalations", "ttft_ms", "reason", "detail",
}  # fmt: skip
KINDS = ("exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")


class Characters(NoText):
    longest_token_chars = 1

    def add(self, token):
        return chr(token)

    def token_text(self, token):
        return chr(token)

    def encode(self, text, **_):
        return [byte % 128 for byte in text.encode()]

    def encode_chat(self, messages, **_):
        return self.encode("\n".join(message["content"] for message in messages))


MODEL = DecoderModel.random(ModelSpec.from_hf_config(SHAPE))


class Server:
    """An app over a started engine, asked through plain calls; one event loop in a thread of its own."""

    def __init__(self, **limits: Any) -> None:
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        config = EngineConfig(model_name="tiny", quality="fast")
        self.inner = assemble(MODEL, pool_tokens=1024, semblend=library, config=config, detokenizer=Characters())
        self.engine = LocalEngine(self.inner, Characters())
        self.app = create_app(self.engine, ServeConfig(**limits))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Server:
        self.engine.start()
        self._thread.start()
        self._http = self._run(self._open())
        return self

    def __exit__(self, *rest: Any) -> None:
        self._run(self._http.aclose())
        self.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(300)
        self._loop.close()

    def post(self, path: str, body: Any) -> Any:
        sent = json.dumps(body).encode()  # httpx refuses half a surrogate pair; a client in another language may not
        return self._run(self._http.post(path, content=sent, headers={"content-type": "application/json"}))

    def get(self, path: str) -> Any:
        return self._run(self._http.get(path))

    async def _open(self) -> Any:
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def prompt_for(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path == "/generate":
        return {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}, **more}
    words = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {**words, "max_tokens": 4, "temperature": 0, **more}


def events(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


# -- sampling options are honoured ---------------------------------------------------------------------------------


def twin(ids: list[int], asked: Sampling) -> list[int]:
    """The answer of a plain loop over the model: no engine, no server, no cache."""
    from semblend.materialize.contract import Rows

    tokens, generator = list(ids), make_generator(asked.seed)
    for _ in range(asked.max_tokens):
        pool = MODEL.new_pool(512)
        slots = torch.arange(16, 16 + len(tokens))
        hidden = MODEL.forward(Rows.of(tokens, torch.arange(len(tokens)), slots), pool)
        drawn = sample(MODEL.logits(hidden[-1:]), [Draw(asked, generator, tokens, len(ids))])[0]
        tokens.append(drawn.token)
    return tokens[len(ids) :]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": {"65": 100}},
        {"temperature": 0, "frequency_penalty": 2.0},
        {"temperature": 0, "presence_penalty": 2.0, "logit_bias": {"66": 3.5, "67": -100}},
        {"temperature": 0, "repetition_penalty": 1.8},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1.5, "seed": 6, "min_p": 0.2},
        {"temperature": 1.5, "seed": 7, "top_k": 3},
        {"temperature": 2.0, "seed": -8, "top_p": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 0.7},
    ],
    ids=lambda options: " ".join(name for name in options if name != "temperature") or "greedy",
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_what_a_request_asks_of_sampling_is_what_a_plain_loop_draws(server, path, options):
    text = "abcabcabcabc"
    ids = Characters().encode(text)
    if path == "/generate":
        params = {"max_new_tokens": 10, "ignore_eos": True, **options}
        got = server.post(path, {"input_ids": ids, "sampling_params": params}).json()["output_ids"]
    else:
        body = {"prompt": ids, "max_tokens": 10, "ignore_eos": True, "logprobs": 0, **options}
        got = [ord(token) for token in server.post(path, body).json()["choices"][0]["logprobs"]["tokens"]]
    bias = tuple((int(token), value) for token, value in options.get("logit_bias", {}).items())
    asked = Sampling(max_tokens=10, **(options | {"logit_bias": bias}))
    assert got == twin(ids, asked)


def test_options_that_change_nothing_change_nothing(server):
    neutral = {
        "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0,
        "top_k": -1,
    }  # fmt: skip
    plain = server.post("/v1/completions", prompt_for("/v1/completions", "hello there")).json()
    same = server.post("/v1/completions", prompt_for("/v1/completions", "hello there", **neutral)).json()
    assert plain["choices"] == same["choices"]


def test_a_bias_on_a_token_outside_the_vocabulary_is_a_400_streamed_or_not(server):
    for stream in (False, True):
        answer = server.post(
            "/v1/completions", prompt_for("/v1/completions", "x", logit_bias={"500": 1}, stream=stream)
        )
        assert answer.status_code == 400
        assert "logit_bias" in answer.json()["error"]["message"]


# -- several prompts in one request --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_n_answers_each_in_order(server, stream):
    texts = ["one two three", "four five six", "seven"]
    alone = [
        server.post("/v1/completions", prompt_for("/v1/completions", text, n=2)).json()["choices"] for text in texts
    ]
    body = prompt_for("/v1/completions", "", prompt=texts, n=2, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    expected = [(choice["text"], choice["finish_reason"]) for choices in alone for choice in choices]
    if not stream:
        told = answer.json()
        assert [choice["index"] for choice in told["choices"]] == list(range(6))
        assert [(choice["text"], choice["finish_reason"]) for choice in told["choices"]] == expected
    else:
        parts = events(answer.text)
        told = parts[-1]
        assert len({part["id"] for part in parts}) == 1
        text, ends = [""] * 6, [None] * 6
        for choice in (choice for part in parts for choice in part["choices"]):
            text[choice["index"]] += choice["text"]
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
        assert list(zip(text, ends, strict=True)) == expected
    assert told["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert told["usage"]["completion_tokens"] == 24
    assert [sum(one[kind] for kind in KINDS) for one in told["semblend"]] == [len(text) for text in texts]


def test_prompts_of_token_ids_may_come_together(server):
    body = server.post("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "temperature": 0}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 5


def test_one_bad_prompt_of_several_ends_all_of_them_and_frees_their_places():
    with Server() as server:
        for stream in (False, True):
            answer = server.post("/v1/completions", {"prompt": ["fine", [1, 500], "fine"], "stream": stream})
            assert answer.status_code == 400, answer.text
        mixed = server.post("/v1/completions", {"prompt": [[5], [1, 500], [6]], "max_tokens": 400})
        assert mixed.status_code == 400
        assert mixed.json()["error"]["param"] == "prompt"
        assert server.app.state.service.admission.running == 0
        assert server.post("/v1/completions", {"prompt": "next", "max_tokens": 1}).status_code == 200
        server.engine.call_soon(lambda inner: inner.check()).result(300)
        assert not server.inner.has_work


def test_more_prompts_than_the_gate_takes_are_429_and_leave_nothing_behind():
    with Server(max_running=1, max_waiting=1) as server:
        refused = server.post("/v1/completions", {"prompt": ["a", "b", "c", "d"], "max_tokens": 50})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        gate = server.app.state.service.admission
        assert (gate.running, gate.waiting) == (0, 0)
        assert server.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}).status_code == 200


# -- what an answer says of itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_has_the_semblend_object_and_the_cached_tokens(path, stream):
    document = " ".join(f"{number * number} boats" for number in range(30))
    with Server() as server:
        first = server.post(path, prompt_for(path, f"how many? {document}"))
        assert first.status_code == 200
        answer = server.post(path, prompt_for(path, f"and where to, please? {document}", stream=stream))
        if stream:
            parts = events(answer.text)
            last = parts[-1]
            if path != "/generate":
                assert not any("semblend" in part for part in parts[:-1])
        else:
            last = answer.json()
        ours = last["semblend"]
        assert set(ours) == OURS
        assert ours["outcome"] == "backend_materialized_reuse"
        assert ours["ttft_ms"] > 0
        assert ours["donors"] == [first.json()["meta_info"]["id"] if path == "/generate" else first.json()["id"]]
        length = len(f"and where to, please? {document}")
        assert sum(ours[kind] for kind in KINDS) == length
        cached = ours["exact_tokens"] + ours["reused_tokens"]
        if path == "/generate":
            assert last["meta_info"]["cached_tokens"] == cached
        elif not stream:
            assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def receipt(**values: Any) -> Receipt:
    given = {
        "request_id": "r", "engine": "e", "namespace": "0" * 32, "outcome": Outcome.BACKEND_MATERIALIZED_REUSE,
        "prompt_tokens": 100, "reused_tokens": 40, "recomputed_tokens": 10, "prefill_tokens": 50,
        "spans": (Span("d", 0, 20, 50),),
    }  # fmt: skip
    return Receipt(**(given | values))


def test_recomputed_runs_are_told_where_they_are_known_and_null_where_not():
    def told(one: Receipt, runs: Any = ()) -> Any:
        return describe_receipt(one, runs, operator=True)["recomputed"]

    assert told(receipt(), ((20, 26), (40, 44))) == [[20, 26], [40, 44]]
    assert told(receipt()) is None
    assert told(receipt(), ((20, 26),)) is None  # they do not add up: not believed
    none = receipt(reused_tokens=50, recomputed_tokens=0)
    assert told(none) == []
    many = receipt(
        prompt_tokens=10_000, reused_tokens=5000, recomputed_tokens=MAX_RUNS + 1, prefill_tokens=4999 - MAX_RUNS,
        spans=(Span("d", 0, 0, 8000),),
    )  # fmt: skip
    runs = tuple((at, at + 1) for at in range(0, 2 * MAX_RUNS + 2, 2))
    assert told(many, runs) is None


def test_a_caller_is_shown_counts_and_an_operator_the_donors_and_places_too():
    declined = {"outcome": Outcome.BACKEND_DECLINED_REUSE, "reused_tokens": 0, "recomputed_tokens": 0, "spans": ()}
    stale = receipt(**declined, prefill_tokens=100, reason=DeclineReason.STALE, detail="donor secret-1 is gone")
    for one in (receipt(), stale):
        caller, operator = describe_receipt(one), describe_receipt(one, operator=True)
        assert set(operator) == OURS
        assert set(caller) == OURS - {"donors", "recomputed"}
        assert {name: caller[name] for name in caller if name != "detail"} == {
            name: operator[name] for name in caller if name != "detail"
        }
    assert "secret-1" not in json.dumps(describe_receipt(stale))
    assert "secret-1" in describe_receipt(stale, operator=True)["detail"]


def test_a_strip_for_a_caller_shows_counts_and_no_places():
    entry = LiveRequest("r", "acme", "/", None, receipt=receipt(), recomputed=((20, 26), (40, 44)))
    shown = entry.to_dict(operator=False)
    assert shown["strip"] == [[0, 40, "reused", None], [40, 50, "recomputed", None], [50, 100, "prefill", None]]
    assert not shown["places_known"]
    assert "tenant" not in shown
    assert "donors" not in shown["semblend"]


def test_a_strip_with_told_runs_shows_them_and_says_so():
    entry = LiveRequest("r", "", "/", None, receipt=receipt(), recomputed=((20, 26), (40, 44)))
    shown = entry.to_dict(operator=True)
    assert shown["places_known"]
    assert [part[:3] for part in shown["strip"]] == [
        [0, 20, "prefill"], [20, 26, "recomputed"], [26, 40, "reused"], [40, 44, "recomputed"], [44, 70, "reused"],
        [70, 100, "prefill"],
    ]  # fmt: skip
    unknown = LiveRequest("r", "", "/", None, receipt=receipt()).to_dict(operator=True)
    assert not unknown["places_known"]
    assert sum(end - start for start, end, kind, _ in unknown["strip"] if kind == "recomputed") == 10


# -- any JSON whatever ---------------------------------------------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(-3, 600)
    | st.floats(allow_nan=False, allow_infinity=False) | st.floats(-3, 3) | st.text(max_size=8)
    | st.sampled_from(["", "fast", "exact", "balanced", "tiny", "user", "\ud800", "\0", "none", "auto", "text"])
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "quality", "reuse", "5", "include_usage"]), inner, max_size=3),  # noqa: E501
    max_leaves=6,
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "text", "input_ids", "stream", "stream_options", "n", "best_of", "stop", "seed",
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "stop_token_ids", "ignore_eos",
    "semblend", "cache_salt", "tools", "tool_choice", "functions", "function_call", "response_format", "modalities",
    "audio", "suffix", "echo", "sampling_params", "return_logprob", "top_logprobs_num", "rid", "user", "metadata",
    "min_tokens", "chat_template", "guided_json", "regex", "json_schema", "image_data", "service_tier", "store",
)  # fmt: skip
PARAMS = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "n", "seed", "presence_penalty",
          "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "stop_token_ids")  # fmt: skip
SMALL = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}


def is_an_error(answer: Any) -> bool:
    body = answer.json()
    error = body.get("error", {})
    return set(error) == {"message", "type", "param", "code", "hint"} and bool(error["message"])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3))
def test_a_good_request_with_any_fields_changed_is_answered_or_refused_and_never_fails(server, path, changes):
    answer = server.post(path, SMALL[path] | changes)
    assert answer.status_code == 200 or (answer.status_code in (400, 404) and is_an_error(answer)), answer.text


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(PARAMS), JSON, min_size=1, max_size=3))
def test_any_sampling_params_are_answered_or_refused(server, params):
    answer = server.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2} | params})
    assert answer.status_code == 200 or (answer.status_code == 400 and is_an_error(answer)), answer.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS)
def test_no_type_of_any_field_makes_the_server_fail(server, path, field):
    for value in (
        None,
        True,
        0,
        -1,
        10**30,
        1.5,
        "",
        "x",
        [],
        [1],
        ["x"],
        [[]],
        [None],
        {},
        {"x": 1},
        {"type": "text"},
    ):
        answer = server.post(path, SMALL[path] | {field: value})
        assert answer.status_code == 200 or (answer.status_code in (400, 404) and is_an_error(answer)), (
            value,
            answer.text,
        )


def test_after_all_that_the_engine_holds_nothing_and_is_right(server):
    server.engine.call_soon(lambda inner: inner.check()).result(300)
    assert not server.inner.has_work
    assert server.app.state.service.admission.running == 0
    ids = Characters().encode("still right?")
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    tokens = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert [ord(token) for token in tokens] == twin(ids, Sampling(max_tokens=6))


# -- models that cannot be loaded ----------------------------------------------------------------------------------


def test_an_unknown_model_or_a_broken_file_is_one_line_with_a_hint(tmp_path):
    from semblend.engine.server.launch import Launch

    (tmp_path / "flipped.gguf").write_bytes(b"FUGG" + bytes(64))
    (tmp_path / "empty.gguf").write_bytes(b"")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for name in ("no-such-model", "flipped.gguf", "empty.gguf", "folder"):
        given = str(tmp_path / name) if (tmp_path / name).exists() else name
        with pytest.raises(SemBlendError) as caught:
            Launch(ServeConfig(model=given, pool_tokens=256)).engine(SemBlendConfig(embedder="none", metrics=False))
        assert caught.value.hint
        assert "\n" not in str(caught.value)
