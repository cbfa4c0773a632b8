"""`semblend warm`: a server is asked once for every prompt, a folder gets every donor once, and both go on."""

from __future__ import annotations

import argparse
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from semblend.cli.commands import warm
from semblend.cli.main import main
from semblend.errors import StoreError


@pytest.fixture
def server():
    """An OpenAI server that keeps what it was asked; ``fail_at`` answers are errors."""
    asked, fail_at = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            failing = fail_at and len(asked) == fail_at[0]
            status = fail_at.pop() and 500 if failing else 200
            if status == 200:
                asked.append((body, self.headers.get("Authorization")))
            answer = json.dumps({"usage": {"prompt_tokens": 11}} if status == 200 else {"error": "broken"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield argparse.Namespace(url=f"http://127.0.0.1:{httpd.server_port}", asked=asked, fail_at=fail_at)
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"document {number} " + "word " * 40)
    return folder


def run_warm(corpus, *words):
    return main(["warm", "--corpus", str(corpus), "--prompt-tokens", "120", *words])


def find_documents(server):
    """Numbers of the documents in what the server was asked, prompt by prompt."""
    texts = [body["messages"][0]["content"] if "messages" in body else body["prompt"] for body, _ in server.asked]
    return [re.findall(r"document (\d)", text) for text in texts]


def test_a_server_gets_every_document_once_for_one_token_with_the_key(server, corpus, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("sk-1\n")
    assert run_warm(corpus, "--url", server.url, "--model", "m", "--api-key-file", str(key)) == 0
    assert find_documents(server) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert all((body["max_tokens"], body["model"], sent) == (1, "m", "Bearer sk-1") for body, sent in server.asked)
    assert capsys.readouterr().out == "5 prompts computed, 55 tokens\n"


def test_a_dry_run_asks_nobody(server, corpus, capsys):
    assert run_warm(corpus, "--url", server.url, "--dry-run") == 0
    assert server.asked == []
    assert "5 prompts" in capsys.readouterr().out


def test_after_a_failure_it_goes_on_where_it_stopped(server, corpus, tmp_path):
    state = tmp_path / "state"
    server.fail_at.append(2)
    assert run_warm(corpus, "--url", server.url, "--state", str(state)) != 0
    assert len(server.asked) == 2
    assert run_warm(corpus, "--url", server.url, "--state", str(state)) == 0
    assert sorted(find_documents(server)) == [["0"], ["1"], ["2"], ["3"], ["4"]]


def test_what_a_log_names_together_stands_in_one_prompt_and_every_other_document_alone(server, corpus, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"passages": ["3.txt", "1.txt"]}\n')
    main(["warm", "--corpus", str(corpus), "--prompt-tokens", "2000", "--log", str(log), "--url", server.url])
    assert find_documents(server) == [["3", "1"], ["0"], ["2"], ["4"]]


def test_documents_stand_in_a_users_message_behind_an_instruction_as_users_send_them(server, corpus, tmp_path):
    run_warm(corpus, "--url", server.url)
    assert [message["role"] for message in server.asked[0][0]["messages"]] == ["user"]
    assert server.asked[0][0]["messages"][0]["content"].startswith(warm.BEFORE + "document 0")
    own = tmp_path / "before.txt"
    own.write_text("Answer from the handbook.\n")
    run_warm(corpus, "--url", server.url, "--before", str(own), "--format", "text")
    assert server.asked[-1][0]["prompt"].startswith("Answer from the handbook.\ndocument 4")


@pytest.mark.parametrize(
    "words", [[], ["--url", "x"], ["--url", "http://127.0.0.1:9"], ["--url", "http://h", "--donor-directory", "d"]]
)
def test_mistakes_are_one_line_and_a_hint(corpus, words, capsys):
    assert run_warm(corpus, *words) != 0
    told = capsys.readouterr().err
    assert "hint:" in told
    assert "Traceback" not in told


def test_a_second_warm_of_the_same_folder_is_refused_until_the_first_has_ended(corpus, tmp_path, capsys):
    from semblend.cli.commands.warm import hold_folder

    first = hold_folder(str(tmp_path / "donors"))
    assert run_warm(corpus, "--donor-directory", str(tmp_path / "donors"), "--model", "no-such-model") != 0
    told = capsys.readouterr().err
    assert "another semblend warm" in told
    assert "hint: wait until it has ended" in told
    first.close()
    assert run_warm(corpus, "--donor-directory", str(tmp_path / "donors"), "--model", "no-such-model") != 0
    assert "no-such-model" in capsys.readouterr().err


class Letters:
    """A tokenizer of the engine's kind: one token a character."""

    def encode(self, text, *, control=True, add_special=True):
        del control, add_special
        return [ord(letter) % 500 for letter in text]

    def encode_chat(self, messages):
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages) + "<model>")


@pytest.fixture
def open_target(tmp_path):
    pytest.importorskip("torch", reason="the engine needs torch")
    from semblend import SemBlend, SemBlendConfig
    from semblend.cli.commands.warm import DirectoryTarget
    from semblend.engine.core.assemble import assemble
    from semblend.engine.core.config import EngineConfig
    from semblend.engine.core.directory_donors import open_directory
    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.spec import ModelSpec

    spec = ModelSpec.from_hf_config({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 500, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0, "tie_word_embeddings": True,
    })  # fmt: skip
    args = argparse.Namespace(donor_directory=str(tmp_path / "donors"), model="tiny", tenant="acme", donor_bits=16)

    def make(bits=16, in_chat=False):
        model = DecoderModel.random(spec)
        kv = open_directory(args.donor_directory, model, bits=bits)
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        config = EngineConfig(quality="fast", model_name="tiny")
        engine = assemble(model, pool_tokens=4096, config=config, semblend=library, directory=kv)
        engine.reuse.share_donors(kv, args.donor_directory, 1 << 40, every_s=0.0)
        return DirectoryTarget(engine, Letters(), args, in_chat=in_chat)

    return make


def warm_up(target, texts):
    args = argparse.Namespace(most_bytes=0, dry_run=False)
    return warm._compute(texts, len(texts), target, args)


def test_a_donor_in_the_folder_is_not_computed_again_and_serves_the_first_question(open_target, capsys):
    from semblend import Namespace, Prompt
    from semblend.wire.request import Request
    from semblend.wire.sampling import Sampling

    texts = [f"{number} " + "the quick brown fox " * 12 + str(number) for number in range(3)]
    first = open_target()
    warm_up(first, texts[:2])
    first.close()
    second = open_target()
    assert [second.has(text) for text in texts] == [True, True, False]
    warm_up(second, texts)
    assert "1 prompts computed" in capsys.readouterr().out
    second.close()
    engine = open_target()._engine
    for tenant, expected in (("acme", True), ("another", False)):
        ids = Letters().encode("Answer this: " + texts[1])
        prompt = Prompt(ids, namespace=Namespace(tenant=tenant, model="tiny"))
        (done,) = engine.generate([Request(f"ask-{tenant}", prompt, Sampling(max_tokens=1, temperature=0.0))])
        assert (done.receipt.reused_tokens > 100) == expected


def test_a_donor_in_chat_is_found_by_the_first_message_that_holds_the_document(open_target):
    from semblend import Namespace, Prompt
    from semblend.wire.request import Request
    from semblend.wire.sampling import Sampling

    text = "the quick brown fox " * 12
    target = open_target(in_chat=True)
    assert target.count_prompt_tokens(text) == target.count_tokens("<user>" + text + "<model>")
    warm_up(target, [warm.BEFORE + text])
    target.close()
    ids = Letters().encode_chat([{"role": "user", "content": "Use this: " + text}])
    asked = Request("ask", Prompt(ids, namespace=Namespace(tenant="acme", model="tiny")), Sampling(max_tokens=1))
    (done,) = open_target()._engine.generate([asked])
    assert done.receipt.reused_tokens > 100
    again = open_target()
    assert not again.has(warm.BEFORE + text)  # as text it is another prompt
    again.close()


def test_a_donor_that_the_server_could_not_use_does_not_count_as_there(open_target):
    text = "the quick brown fox jumps over the lazy dog " * 8
    first = open_target()
    warm_up(first, [text])
    first.close()
    other, same = open_target(bits=8), open_target()
    assert (other.has(text), same.has(text)) == (False, True)
    other.close()
    same.close()


def test_a_full_disk_is_told_with_a_hint_and_leaves_nothing_half_written(open_target, monkeypatch):
    from semblend.materialize.donors.directory_kv import DirectoryKv

    def no_space(*_):
        raise OSError(28, "No space left on device")

    target = open_target()
    monkeypatch.setattr(DirectoryKv, "write", no_space)
    with pytest.raises(StoreError) as caught:
        warm_up(target, ["a long text that does not fit " * 8])
    assert "No space left" in caught.value.message
    assert "the same command goes on where it stopped" in caught.value.hint
    monkeypatch.undo()
    target.close()
    assert not open_target().has("a long text that does not fit " * 8)


def test_a_disk_without_room_for_a_donors_record_is_told_too(open_target, monkeypatch):
    from semblend.materialize.donors.store import PrivateFolder

    def no_space(*_):
        raise OSError(28, "No space left on device")

    target = open_target()
    monkeypatch.setattr(PrivateFolder, "write", no_space)
    with pytest.raises(StoreError, match="could not be written"):
        warm_up(target, ["a long text that does not fit " * 8])
    target.close()


def test_a_donor_that_no_memory_holds_is_told(open_target, monkeypatch):
    from semblend.errors import CapacityError
    from semblend.materialize.donors.tiers import DonorKv

    def no_tier(*_, **__):
        raise CapacityError("it fits in no tier", hint="raise the donor budgets")

    target = open_target()
    monkeypatch.setattr(DonorKv, "capture", no_tier)
    with pytest.raises(StoreError, match="could not be written"):
        warm_up(target, ["a long text that does not fit " * 8])
    target.close()


def test_a_document_that_comes_twice_or_begins_another_is_no_failure(open_target, capsys):
    text = "the quick brown fox jumps over the lazy dog " * 8
    target = open_target()
    warm_up(target, [text, text, text[:200]])
    assert "3 prompts computed" in capsys.readouterr().out
    target.close()


def test_too_little_room_is_told_before_the_work(open_target, monkeypatch):
    target = open_target()
    monkeypatch.setattr("shutil.disk_usage", lambda _: argparse.Namespace(free=10))
    with pytest.raises(StoreError):
        warm_up(target, ["some text of this length " * 8])
    assert not target._there
    target.close()
