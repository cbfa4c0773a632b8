"""The explorer over real HTTP on loopback: its answers, its limits, and what it refuses."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser import in_a_browser, read_dom, read_text

from semblend import SemBlendConfig
from semblend import explorer as explorer_server
from semblend.errors import InputError
from semblend.explorer import MAX_BODY_BYTES, PAGE_FILES, ExplorerApp, ExplorerServer
from semblend.text.tokenization import StableTokenizer
from semblend.web.site import read_static

EXAMPLES = json.loads(read_static("explorer/examples.json"))
TEXT = "Two hours before high tide the pilot boat leaves the north pier, and large vessels may enter. " * 6


class Client:
    """One request, one connection; gives the status and the parsed answer."""

    def __init__(self, port: int) -> None:
        self.port = port

    def raw(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        packed = None if body is None else json.dumps(body).encode()
        status, content, _ = self.raw(method, path, packed, Content_Type="application/json")
        return status, json.loads(content)


def serving(config: SemBlendConfig) -> Iterator[Client]:
    app = ExplorerApp(config, StableTokenizer())
    with ExplorerServer(app, port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Client(server.server_address[1])
        server.shutdown()
        thread.join()
    app.close()


@pytest.fixture
def ask() -> Iterator[Client]:
    yield from serving(SemBlendConfig(embedder="none", max_bytes=1 << 24, metrics=False))


def test_the_page_and_its_parts_are_served_with_a_policy_that_lets_nothing_else_in(ask: Client) -> None:
    for path, (body, kind) in PAGE_FILES.items():
        status, content, headers = ask.raw("GET", path)
        assert (status, content, headers["Content-Type"]) == (200, body, kind)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, content, _ = ask.raw("HEAD", "/")
    assert (status, content) == (200, b"")


def test_health_tells_version_tokenizer_and_donors(ask: Client) -> None:
    status, answer = ask("GET", "/health")
    assert status == 200
    assert (answer["status"], answer["tokenizer"], answer["donors"], answer["store"]) == ("ok", "stable", 0, None)


def test_a_donor_is_added_listed_replaced_and_forgotten(ask: Client) -> None:
    status, answer = ask("POST", "/api/donors", {"text": TEXT, "donor_id": "a/b ü", "tenant": "t"})
    assert status == 200
    assert answer["donor"]["tenant"] == "t"
    ask("POST", "/api/donors", {"text": TEXT + ", more", "donor_id": "a/b ü"})
    (row,) = ask("GET", "/api/donors")[1]["donors"]
    assert row["token_count"] == answer["donor"]["token_count"] + 1
    assert row["preview"] == TEXT[:240]
    assert ask("DELETE", "/api/donors/a%2Fb%20%C3%BC") == (200, {"forgotten": "a/b ü"})
    assert ask("GET", "/api/donors")[1] == {"donors": []}
    status, answer = ask("DELETE", "/api/donors/a%2Fb%20%C3%BC")
    assert status == 404
    assert answer["hint"]


def test_donors_without_a_name_get_different_ones(ask: Client) -> None:
    ask("POST", "/api/donors", {"text": TEXT, "donor_id": "doc-2"})
    names = [ask("POST", "/api/donors", {"text": TEXT})[1]["donor"]["donor_id"] for _ in range(2)]
    assert names == ["doc-1", "doc-3"]


def test_every_token_of_an_explained_prompt_has_its_donor_or_null(ask: Client) -> None:
    ask("POST", "/api/donors", {"text": TEXT, "donor_id": "harbour"})
    status, answer = ask("POST", "/api/explain", {"text": "Before all else. " + TEXT})
    assert status == 200
    assert "".join(answer["pieces"]) == "Before all else. " + TEXT
    assert len(answer["pieces"]) == len(answer["owners"])
    assert answer["donor_ids"] == ["harbour"]
    (span, *_) = answer["explanation"]["decision"]["spans"]
    held = [at for at, owner in enumerate(answer["owners"]) if owner is not None]
    assert held[0] == span["target_start"] > 0
    assert len(held) == answer["explanation"]["decision"]["reused_tokens"]
    assert answer["prefix_tokens"] == 0
    assert answer["timing"]["lookup_ms"] >= 0
    assert [stage["name"] for stage in answer["explanation"]["stages"]]


def test_the_prefix_that_a_plain_cache_would_hold_is_told_in_whole_blocks(ask: Client) -> None:
    ask("POST", "/api/donors", {"text": TEXT})
    total = len(StableTokenizer().encode(TEXT))
    assert ask("POST", "/api/explain", {"text": TEXT})[1]["prefix_tokens"] == (total - 1) // 16 * 16


def test_a_tenant_does_not_see_the_donors_of_another(ask: Client) -> None:
    ask("POST", "/api/donors", {"text": TEXT, "tenant": "a"})
    for tenant, held in (("a", True), ("b", False), ("", False)):
        answer = ask("POST", "/api/explain", {"text": TEXT, "tenant": tenant})[1]
        assert any(owner is not None for owner in answer["owners"]) is held
        assert (answer["prefix_tokens"] > 0) is held


def test_stats_and_events_tell_what_happened(ask: Client) -> None:
    ask("POST", "/api/donors", {"text": TEXT, "donor_id": "harbour"})
    ask("POST", "/api/explain", {"text": TEXT})
    assert ask("GET", "/api/stats")[1]["donors"] == 1
    kinds = [event["event"] for event in ask("GET", "/api/events")[1]["events"]]
    assert kinds == ["donor_registered", "lookup", "reuse_planned"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["key"])
def test_each_example_shows_what_it_promises(ask: Client, example: Any) -> None:
    for donor in example["donors"]:
        assert ask("POST", "/api/donors", donor)[0] == 200
    answer = ask("POST", "/api/explain", {"text": example["prompt"]})[1]
    total = len(answer["owners"])
    held = sum(owner is not None for owner in answer["owners"])
    share = held / total
    if example["key"] == "paraphrase":
        assert share == 0
        return
    assert share > 0.85
    assert answer["prefix_tokens"] / total < 0.25
    assert len(answer["donor_ids"]) == len(example["donors"])
    if example["key"] == "three-words":
        assert total - held == 3


def test_the_examples_are_offered_to_the_page(ask: Client) -> None:
    offered = ask("GET", "/api/examples")[1]["examples"]
    assert [example["key"] for example in offered] == [example["key"] for example in EXAMPLES]


def test_text_with_a_lone_surrogate_comes_back_whole(ask: Client) -> None:
    status, answer = ask("POST", "/api/explain", {"text": "half \ud83e of a fox"})
    assert status == 200
    assert "".join(answer["pieces"]) == "half \ud83e of a fox"


# -- limits and refusals -------------------------------------------------------------------------------------------


def test_a_body_beyond_the_limit_is_413_and_one_at_the_limit_is_read(ask: Client) -> None:
    status, content, _ = ask.raw("POST", "/api/explain", b"", Content_Type="application/json",
                                 Content_Length=str(MAX_BODY_BYTES + 1))  # fmt: skip
    assert status == 413
    assert str(MAX_BODY_BYTES) in json.loads(content)["hint"]
    filler = json.dumps({"text": ""})[:-2]
    body = (filler + "x" * (MAX_BODY_BYTES - len(filler) - 2) + '"}').encode()
    assert len(body) == MAX_BODY_BYTES
    assert ask.raw("POST", "/api/explain", body, Content_Type="application/json")[0] == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"", b'"x"', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_400_with_error_and_hint(ask: Client, body: bytes) -> None:
    status, content, _ = ask.raw("POST", "/api/donors", body, Content_Type="application/json")
    answer = json.loads(content)
    assert status == 400
    assert answer["error"]
    assert answer["hint"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "text is missing or empty"),
        ({"text": ""}, "text is missing or empty"),
        ({"text": 5}, "text is not a string"),
        ({"text": "x", "tenant": []}, "tenant is not a string"),
        ({"text": "x", "colour": "red"}, "unknown field 'colour'"),
        ({"text": "x", "donor_id": "y" * 201}, "donor_id is too long"),
    ],
)
def test_a_wrong_field_is_400_and_named(ask: Client, body: Any, error: str) -> None:
    status, answer = ask("POST", "/api/donors", body)
    assert (status, answer["error"]) == (400, error)
    assert answer["hint"]


def test_a_donor_that_cannot_fit_is_507(ask: Client) -> None:
    client = serving(SemBlendConfig(embedder="none", max_bytes=1 << 16, metrics=False))
    small = next(client)
    try:
        status, answer = small("POST", "/api/donors", {"text": "many different words " * 20_000})
    finally:
        next(client, None)
    assert status == 507
    assert "max_bytes" in answer["hint"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/../app.py", 404), ("GET", "/api/explain", 405), ("POST", "/health", 405),
     ("DELETE", "/api/stats", 405), ("DELETE", "/api/donors/nobody", 404)],
)  # fmt: skip
def test_wrong_paths_and_methods_are_told_apart(ask: Client, method: str, path: str, status: int) -> None:
    assert ask(method, path)[0] == status


def test_another_sites_page_cannot_reach_it(ask: Client) -> None:
    # A rebound DNS name arrives with a foreign Host header; a form cannot send application/json.
    assert ask.raw("GET", "/api/donors", Host="evil.example")[0] == 403
    assert ask.raw("POST", "/api/donors", b'{"text": "x"}', Content_Type="text/plain")[0] == 415
    assert ask("GET", "/api/donors")[1] == {"donors": []}


def test_a_fault_of_ours_is_500_and_the_server_goes_on(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ExplorerApp) -> dict[str, Any]:
        raise RuntimeError("oh")

    monkeypatch.setitem(explorer_server.GET, "/api/stats", broken)
    status, answer = ask("GET", "/api/stats")
    assert status == 500
    assert "RuntimeError" in answer["error"]
    assert ask("GET", "/health")[0] == 200


def test_many_requests_at_once_all_get_their_answer(ask: Client) -> None:
    def work(number: int) -> int:
        ask("POST", "/api/donors", {"text": f"{number} {TEXT}", "donor_id": f"d{number}"})
        return ask("POST", "/api/explain", {"text": TEXT})[0]

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(24))) == {200}
    assert ask("GET", "/health")[1]["donors"] == 24


def test_donors_of_a_store_file_are_there_after_a_restart(tmp_path: Path) -> None:
    config = SemBlendConfig(embedder="none", max_bytes=1 << 24, metrics=False, store=str(tmp_path / "s.semblend"))
    first = serving(config)
    next(first)("POST", "/api/donors", {"text": TEXT, "donor_id": "kept"})
    next(first, None)
    second = serving(config)
    (row,) = next(second)("GET", "/api/donors")[1]["donors"]
    next(second, None)
    assert (row["donor_id"], row["preview"]) == ("kept", None)


def test_a_taken_port_is_an_input_error_with_a_way_out(ask: Client) -> None:
    app = ExplorerApp(SemBlendConfig(embedder="none", max_bytes=1 << 20, metrics=False), StableTokenizer())
    try:
        with pytest.raises(InputError, match="cannot listen") as caught:
            ExplorerServer(app, port=ask.port)
        with pytest.raises(InputError, match="cannot listen"):
            ExplorerServer(app, port=99_999)
    finally:
        app.close()
    assert "--port" in caught.value.hint


def test_broken_headers_are_refused_in_json_and_not_by_a_fault(ask: Client) -> None:
    for headers in ({"Host": "["}, {"Content_Type": "application/json", "Content_Length": "9" * 5000}):
        status, content, _ = ask.raw("POST", "/api/explain", None, **headers)
        assert 400 <= status < 500
        assert json.loads(content)["error"]
    status, content, _ = ask.raw("PUT", "/api/donors")
    assert status == 405
    assert json.loads(content)["error"]


def test_many_visitors_at_once_are_all_answered(ask: Client) -> None:
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(lambda _: ask("GET", "/health")[0], range(180)))
    assert set(answers) == {200}


@in_a_browser
def test_an_example_is_explained_in_a_browser(ask: Client, tmp_path: Path) -> None:
    page = read_dom(f"http://127.0.0.1:{ask.port}/#three-words", tmp_path)
    assert read_text(page, "verdict") == "of this prompt is held by donors"
    assert "the engine would prefill the other 3" in read_text(page, "verdict-detail")
    assert re.search(r'id="strip-box"[^>]*aria-label="367 tokens, 364 of them held by donors"', page)
    assert len(re.findall(r"<rect", page.split('id="bars"')[1].split('id="strip-box"')[0])) == 5  # a prefix, four spans
    assert len(re.findall(r"<mark", page)) == 4
    assert read_text(page, "problem") == ""
