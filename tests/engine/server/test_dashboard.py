"""The dashboard in a real browser, against the fake engine over a real socket."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
uvicorn = pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")
httpx = pytest.importorskip("httpx", reason="the tests need httpx")

from browser import in_a_browser, read_dom, read_text  # noqa: E402
from starlette.responses import HTMLResponse  # noqa: E402

from semblend.config import SemBlendConfig  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.routes import PAGE_FILES, create_app  # noqa: E402
from semblend.engine.server.tenants import Tenants  # noqa: E402
from semblend.facade import SemBlend  # noqa: E402
from semblend.session.trial import Comparison  # noqa: E402
from semblend.web.site import HEADERS  # noqa: E402
from tests.fakes.fake_engine import FakeEngine, Pace  # noqa: E402


@pytest.fixture
def serve() -> Iterator[Any]:
    stops = []

    def start(key: str = "", **limits: Any) -> tuple[str, FakeEngine]:
        fake = FakeEngine(SemBlend(SemBlendConfig(embedder="none")))
        app = create_app(fake, ServeConfig(**limits))

        async def enter() -> HTMLResponse:
            """A page that types the key and opens the dashboard."""
            return HTMLResponse(f"<script>sessionStorage.setItem('semblend-key', '{key}'); location = '/'</script>")

        app.add_api_route("/enter", enter)
        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="critical", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
        thread.start()
        stops.append((server, thread, sock))
        return f"http://127.0.0.1:{sock.getsockname()[1]}", fake

    yield start
    for server, thread, sock in stops:
        server.should_exit = True
        thread.join(300)
        sock.close()


@in_a_browser
def test_the_playground_shows_how_the_second_question_reuses_the_first(serve, tmp_path):
    url, fake = serve()
    page = read_dom(f"{url}/#demo", tmp_path)
    verdict = re.search(r'<p id="verdict".*?</p>', page, re.DOTALL)
    assert verdict
    shown = re.sub(r"<[^>]+>", "", verdict[0])
    share = re.match(r"(\d+) % of the second prompt was taken from the first request and moved into place", shown)
    assert share, shown
    assert int(share[1]) > 60
    assert page.count('class="lane"') == 2
    assert "lighthouse at Skarholm" in page.split('id="lane-2"')[1]  # the answer itself
    assert len(fake.donors()) == 1  # the second ran on moved KV and is no donor


@in_a_browser
def test_requests_appear_as_strips_with_their_outcomes(serve, tmp_path):
    url, _ = serve()
    page = read_dom(f"{url}/#demo", tmp_path)
    assert len(re.findall(r'<details class="request done', page)) == 2
    strips = re.findall(r'<span class="strip"><svg.*?</svg>', page)
    assert "var(--reused)" in strips[0]  # the latest is first
    assert "var(--recomputed)" in strips[0]
    assert "var(--reused)" not in strips[1]
    outcomes = page.split('id="outcomes"')[1].split("</section>")[0]
    assert "backend materialized reuse" in outcomes
    assert "cold fallback" in outcomes
    assert "nothing shared" in page.split('id="declines"')[1].split("</section>")[0]
    assert re.search(r"\d+ %", read_text(page, "share"))


def ask_all(url: str, *texts: str, **more: Any) -> list[int]:
    with httpx.Client(timeout=300) as http:
        bodies = [{"messages": [{"role": "user", "content": text}], "max_tokens": 2} | more for text in texts]
        return [http.post(f"{url}/v1/chat/completions", json=body).status_code for body in bodies]


def write_text(seed: int, sentences: int) -> str:
    return " ".join(f"Rule {seed} of clause {n} says that ferry {n * 7 + seed} leaves." for n in range(sentences))


@in_a_browser
def test_exact_hits_alone_give_no_factor_with_reuse(serve, tmp_path):
    url, _ = serve()
    assert ask_all(url, *[write_text(1, 40)] * 6) == [200] * 6
    page = read_dom(url, tmp_path)
    assert "exact prefix route" in page.split('id="outcomes"')[1].split("</section>")[0]
    assert read_text(page, "speed") == "–"
    assert read_text(page, "speed-note") == "nothing relocated yet"


@in_a_browser
def test_moved_kv_is_compared_with_what_requests_without_it_took(serve, tmp_path):
    url, fake = serve()
    fake.pace = Pace(prefill_tokens_per_s=20_000.0, load_tokens_per_s=1_000_000.0)
    colds = [write_text(seed, 10 * seed) for seed in range(1, 6)]
    ask_all(url, *colds, f"Which ferry? {colds[-1]}")
    page = read_dom(url, tmp_path)
    assert re.match(r"\d", read_text(page, "speed"))
    assert read_text(page, "speed-note").startswith("median of 1 with relocated tokens, against a cold estimate from 5")


@in_a_browser
def test_requests_that_were_abandoned_or_refused_say_so(serve, tmp_path):
    url, fake = serve(max_running=1, max_waiting=1)
    fake.pace = Pace(overhead_s=600.0)
    body = {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(timeout=300) as http:

            async def see(*states: str) -> None:
                news: list[str] = []
                while sorted(news) != sorted(states):
                    await asyncio.sleep(0.02)
                    news = [one["state"] for one in (await http.get(f"{url}/api/live")).json()["requests"]]

            asked = []
            for states in (["running"], ["running", "waiting"]):
                asked.append(asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=body)))
                await see(*states)
            assert (await http.post(f"{url}/v1/chat/completions", json=body)).status_code == 429
            for one in reversed(asked):
                one.cancel()
                await asyncio.gather(one, return_exceptions=True)
            await see("cancelled", "cancelled", "refused")

    asyncio.run(asyncio.wait_for(ask_and_leave(), 120))
    page = read_dom(url, tmp_path)
    rows = re.findall(r'<details class="request.*?</summary>', page, re.DOTALL)
    assert ["abandoned" in row for row in rows] == [False, True, True]  # the latest first
    assert "refused" in rows[0]
    assert "at work…" not in page
    assert "in line…" not in page


@in_a_browser
def test_a_visitor_without_a_key_is_asked_for_one_and_sees_nothing(serve, tmp_path):
    url, _ = serve(tenants=Tenants({"sk-acme": "acme"}))
    page = read_dom(url, tmp_path)
    form = re.search(r'<form id="key-form"[^>]*>', page)
    assert form
    assert "hidden" not in form[0]
    assert "no API key" in read_text(page, "health")
    assert "<details" not in page


@in_a_browser
@pytest.mark.parametrize(("given", "shown", "names"), [("sk-acme", 1, "tenant acme"), ("sk-root", 3, "fake")])
def test_a_tenant_sees_its_own_figures_and_an_admin_everybodys(serve, tmp_path, given, shown, names):
    url, _ = serve(given, tenants=Tenants({"sk-acme": "acme", "sk-bolt": "bolt"}, admin_keys=["sk-root"]))
    for name in ("sk-acme", "sk-bolt", "sk-bolt"):
        body = {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}
        httpx.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {name}"})
    page = read_dom(f"{url}/enter", tmp_path)
    assert names in read_text(page, "health")
    assert len(re.findall(r'<details class="request done', page)) == shown
    assert read_text(page, "requests-note").startswith(f"{shown} done")


PAYS = Comparison("one donor in order, 4096+ tokens, 1+ spans", 120, 6, 40.0, 80.5, 0.497, 0.41, 0.6)
COSTS = Comparison("several donors, 128+ tokens, 4+ spans", 31, 5, 22.0, 20.0, 1.1, 0.9, 1.34)


@in_a_browser
def test_first_tokens_with_and_without_reuse_are_shown_by_kind_with_their_interval(serve, tmp_path):
    url, fake = serve()
    fake.comparisons += [COSTS, PAYS]
    shown = read_dom(url, tmp_path).split('id="pays"')[1].split("</section>")[0]
    words = re.sub(r"<[^>]+>", " ", shown)
    assert "0.50 (0.41 to 0.60)" in words
    assert re.search(r"40 ms with \(120\) · 81 ms without \(6\)", words)
    assert words.index(PAYS.kind) < words.index(COSTS.kind), "the kind with most requests first"


@in_a_browser
def test_before_enough_was_compared_the_page_says_so(serve, tmp_path):
    url, _ = serve()
    shown = read_dom(url, tmp_path).split('id="pays"')[1].split("</section>")[0]
    assert "Too few requests of a kind" in shown


def test_only_an_admin_is_told_how_everybodys_requests_compare(serve):
    url, fake = serve(tenants=Tenants({"sk-acme": "acme"}, admin_keys=["sk-root"]))
    fake.comparisons += [COSTS, PAYS]
    told = {
        key: httpx.get(f"{url}/api/live", headers={"Authorization": f"Bearer {key}"}).json()["compared"]
        for key in ("sk-acme", "sk-root")
    }
    assert told["sk-acme"] == []
    assert [one["kind"] for one in told["sk-root"]] == [PAYS.kind, COSTS.kind]
    assert (told["sk-root"][0]["ratio"], told["sk-root"][0]["without_ms"]) == (0.497, 80.5)


def test_the_page_and_its_parts_are_served_with_a_policy_that_lets_nothing_else_in(serve):
    url, _ = serve(tenants=Tenants({"sk-acme": "acme"}))  # the empty page needs no key
    for path, (body, kind) in PAGE_FILES.items():
        answer = httpx.get(f"{url}{path}")
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, body, kind)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
