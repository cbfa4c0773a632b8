"""Logs of other people: recognised by what they look like, read into one shape, and never believed to be in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import InputError
from semblend.text.log_formats import recognise_line
from semblend.text.logs import LoggedPrompt, PromptLog

HOSTILE = "It's \"quoted\", params: , prompt_token_ids: [9, 9]\n\\'</script>\u2028 \x00"


def read(tmp_path: Path, *lines: str, **options: Any) -> tuple[list[LoggedPrompt], PromptLog]:
    path = tmp_path / "log"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    log = PromptLog(str(path), **options)
    return list(log), log


def test_the_prompts_of_a_vllm_server_are_found_between_its_other_lines(tmp_path: Path) -> None:
    found, log = read(
        tmp_path,
        "INFO 08-01 21:24:09 [loggers.py:273] Engine 000: Avg prompt throughput: 6.8 tokens/s",
        f"DEBUG [request_logger.py:55] Request chat-1 details: prompt: {HOSTILE!r}, prompt_token_ids: None, "
        "prompt_embeds shape: None.",
        "INFO [request_logger.py:65] Received request chat-1: params: SamplingParams(n=1), lora_request: None.",
        "INFO 07-01 [logger.py:43] Received request cmpl-2: prompt: 'Hi', params: SamplingParams(n=1), "
        "prompt_token_ids: [5, 6], lora_request: LoRARequest(lora_name='fr', lora_int_id=1).",
    )
    assert log.found_format == "vllm"
    assert [one.text for one in found] == [HOSTILE, None]
    assert found[1].token_ids is not None
    assert found[1].token_ids.tolist() == [5, 6]
    assert (found[0].request_id, found[1].request_id, found[1].adapter) == ("chat-1", "cmpl-2", "fr")
    assert log.skipped == 0


def test_the_prompts_of_an_sglang_server_are_read_from_text_and_from_json(tmp_path: Path) -> None:
    event = {"timestamp": "2026-01-01T00:00:00", "event": "request.received", "rid": "c", "obj": {"text": HOSTILE}}
    done = event | {"event": "request.finished", "out": {}}
    found, log = read(
        tmp_path,
        "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m')",
        f"[00:00:00] Receive: obj=GenerateReqInput(rid='a', text={HOSTILE!r}, input_ids=None, extra_key='s')",
        "[2026-01-01 00:00:00] Receive: obj=GenerateReqInput(rid='b', text=None, input_ids=[1, 2], extra_key=None)",
        f"[2026-01-01 00:00:00] Finish: obj=GenerateReqInput(rid='a', text={HOSTILE!r}, input_ids=None), out={{}}",
        json.dumps(event),
        json.dumps(done),
    )
    assert log.found_format == "sglang"
    assert [one.text for one in found] == [HOSTILE, None, HOSTILE]
    assert [one.request_id for one in found] == ["a", "b", "c"]
    assert found[0].salt == "s"


def test_a_prompt_that_the_server_cut_is_not_taken_for_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cut by the server"):
        read(tmp_path, "Receive: obj=GenerateReqInput(rid='a', text='begin' ... 'end', input_ids=None)")


def test_a_shared_conversation_is_one_prompt_for_every_turn_of_the_user(tmp_path: Path) -> None:
    turns = [("system", "S"), ("human", "one"), ("gpt", "two"), ("human", "three"), ("gpt", "four")]
    record = {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}
    found, log = read(tmp_path, json.dumps(record))
    assert log.found_format == "sharegpt"
    assert [one.answer for one in found] == ["two", "four"]
    assert found[1].text == "<|system|>\nS\n<|user|>\none\n<|assistant|>\ntwo\n<|user|>\nthree"
    assert found[1].text.startswith(f"{found[0].text}\n<|assistant|>\n{found[0].answer}")


def test_equal_blocks_of_a_trace_become_equal_tokens(tmp_path: Path) -> None:
    blocks = [
        {"content_hash": "a", "token_count": 5, "semantic_type": "system"},
        {"content_hash": "b", "token_count": 7, "semantic_type": "retrieved_context"},
    ]
    (one, two), log = read(
        tmp_path,
        json.dumps({"timestamp_ms": 0, "tenant_id": "t", "blocks": blocks}),
        json.dumps({"timestamp_ms": 1, "tenant_id": "t", "blocks": blocks[::-1]}),
    )
    assert log.found_format == "trace"
    assert one.token_ids is not None
    assert two.token_ids is not None
    assert one.token_ids[:5].tolist() == two.token_ids[7:].tolist()
    assert [part.kind for part in one.parts] == ["text", "passage"]
    assert one.tenant == "t"


def test_a_mooncake_block_has_512_tokens_and_the_last_one_the_rest(tmp_path: Path) -> None:
    (one,), _ = read(
        tmp_path, json.dumps({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3, 4]})
    )
    assert [len(part.token_ids) for part in one.parts if part.token_ids is not None] == [512, 88]
    with pytest.raises(InputError, match="not a whole number below"):
        read(tmp_path, json.dumps({"timestamp": 0, "input_length": 10**12, "hash_ids": [3]}))


@pytest.mark.parametrize("indent", [None, 2])
def test_one_json_list_is_read_value_by_value(tmp_path: Path, indent: int | None) -> None:
    records = [{"prompt": text} for text in ("a, [b] {c}", 'say "x\\', HOSTILE)]
    found, _ = read(tmp_path, json.dumps(records, indent=indent))
    assert [one.text for one in found] == [record["prompt"] for record in records]
    assert [one.line for one in found] == [1, 2, 3]


@given(
    st.lists(st.dictionaries(st.just("prompt"), st.text(min_size=1, max_size=8), min_size=1), min_size=1, max_size=5)
)
def test_any_list_of_prompts_comes_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]]
) -> None:
    found, _ = read(tmp_path_factory.mktemp("list"), json.dumps(records))
    assert [one.text for one in found] == [record["prompt"] for record in records]


def test_a_list_that_ends_too_early_loses_only_its_last_value(tmp_path: Path) -> None:
    found, log = read(tmp_path, '[{"prompt": "a"}, {"prompt": "b"', skip_bad=True)
    assert ([one.text for one in found], log.skipped) == (["a"], 1)


def test_the_answer_of_a_logged_response_is_kept(tmp_path: Path) -> None:
    choices = {"choices": [{"message": {"content": "Yes."}}]}
    messages = [{"role": "user", "content": "Hi"}]
    found, _ = read(
        tmp_path,
        json.dumps({"request": {"messages": messages}, "response": choices}),
        json.dumps({"body": {"messages": messages}, "response": {"body": choices}}),
        json.dumps({"messages": messages, "cache_salt": "s"}),
    )
    assert [one.answer for one in found] == ["Yes.", "Yes.", ""]
    assert found[2].salt == "s"


def test_a_format_that_is_named_is_not_guessed(tmp_path: Path) -> None:
    found, log = read(tmp_path, json.dumps({"prompt": "Hi"}), format="vllm")
    assert (found, log.found_format) == ([], "vllm")
    assert "VLLM_LOGGING_LEVEL=DEBUG" in log.hint
    with pytest.raises(InputError, match="unknown log format 'csv'"):
        PromptLog("x", format="csv")


def test_a_line_that_tells_nothing_is_left_to_the_next_one() -> None:
    assert recognise_line(b"INFO: Started server process [1]\n") is None
    assert recognise_line(b"not json {\n") is None


@pytest.mark.data
def test_real_server_logs_without_prompts_hold_none(data_dir: Path) -> None:
    for path in (data_dir / "backend_logs").glob("*.log"):
        log = PromptLog(str(path), format=path.name.split("__")[0])
        assert (list(log), log.skipped) == ([], 0)


@pytest.mark.data
def test_real_conversations_and_a_real_trace_are_recognised(data_dir: Path, tmp_path: Path) -> None:
    for name, format in (("chat/sharegpt_multiturn", "sharegpt"), ("traces/mooncake_conversation_first_half", "trace")):
        with gzip.open(data_dir / f"{name}.jsonl.gz", "rt") as stream:
            lines = [next(stream).rstrip("\n") for _ in range(20)]
        found, log = read(tmp_path, *lines)
        assert log.found_format == format
        assert len(found) >= 20
        assert log.skipped == 0
