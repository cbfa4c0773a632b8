"""HiCache with our storage: stored, evicted, restarted, fetched; what is damaged is a miss; a document moves.

The first server is SGLang's own. The one that starts after it was killed has our cache too, and the same pages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from http_server import LAUNCHER, STOCK, Server

DOCUMENT = " ".join(f"Item {n} costs {3 * n + 1} dollars and ships on day {n % 28}." for n in range(20))
PROMPT = "Read the list, then answer.\n" + DOCUMENT + "\nQuestion: what does item 5 cost?\nAnswer:"
MOVED = "You run a small shop. Look at what you sell.\n" + DOCUMENT + "\nQuestion: what does item 7 cost?\nAnswer:"
PAGE = 16


def start(folder: Path, log: Path, command: Sequence[str] = STOCK) -> Server:
    extra = {
        "backend_name": "semblend",
        "module_path": "semblend.integration.sglang.hicache.page_storage",
        "class_name": "SemBlendPages",
        "directory": str(folder),
        "max_bytes": 200_000_000,
        "prefetch_threshold": PAGE,
    }
    return Server(
        log,
        *("--page-size", str(PAGE), "--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
        *("--hicache-write-policy", "write_through", "--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", json.dumps(extra)),
        command=command,
        SEMBLEND_QUALITY="fast",
    )


def list_pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.page"))


def wait_until_stored(folder: Path, pages: int) -> None:
    deadline = time.monotonic() + 300
    while len(list_pages(folder)) < pages:
        assert time.monotonic() < deadline, f"{len(list_pages(folder))} pages are stored of {pages}"
        time.sleep(0.2)


def fetched_tokens(answer: dict) -> int:
    return int((answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0))


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A prompt is computed; its pages are evicted and fetched; the server is killed; another one starts."""
    base = tmp_path_factory.mktemp("hicache")
    folder, found = base / "pages", {}
    first = start(folder, base / "first.log")
    try:
        found["cold"] = first.generate(PROMPT)
        pages = found["cold"]["meta_info"]["prompt_tokens"] // PAGE
        wait_until_stored(folder, pages)
        first.flush()
        found["evicted"] = first.generate(PROMPT)
        found["other salt"] = first.generate(PROMPT, salt="ben")
    finally:
        first.stop()  # by SIGKILL
    found["logs"] = (base / "first.log").read_text()
    (folder / "0123.abcd.part").write_bytes(b"half a page")
    second = start(folder, base / "second.log", LAUNCHER)
    try:
        found["restarted"] = second.generate(PROMPT)
        second.flush()
        found["stored pages"] = len(list_pages(folder))
        for path in list_pages(folder):
            content = bytearray(path.read_bytes())
            content[-100] ^= 1
            path.write_bytes(bytes(content))
        found["damaged"] = second.generate(PROMPT)
        wait_until_stored(folder, pages)
        second.flush()
        found["stored again"] = second.generate(PROMPT)
        found["moved"] = second.generate(MOVED)
        time.sleep(3)  # whatever would be stored of it
        second.flush()  # donors go too
        found["moved, flushed"] = second.generate(MOVED)
    finally:
        second.stop()
    found["second log"] = (base / "second.log").read_text()
    found["folder"] = folder
    return found


def test_pages_that_were_evicted_are_fetched_and_the_answer_is_as_before(life):
    whole = (life["cold"]["meta_info"]["prompt_tokens"] - 1) // PAGE * PAGE
    assert fetched_tokens(life["cold"]) == 0
    assert fetched_tokens(life["evicted"]) == whole
    assert life["evicted"]["text"] == life["cold"]["text"]


def test_a_server_that_starts_after_a_kill_fetches_what_the_dead_one_stored(life):
    assert fetched_tokens(life["restarted"]) == fetched_tokens(life["evicted"]) > 0
    assert life["restarted"]["text"] == life["cold"]["text"]


def test_another_salt_fetches_nothing(life):
    assert fetched_tokens(life["other salt"]) == 0
    assert life["other salt"]["text"] == life["cold"]["text"]


def test_a_damaged_page_is_a_miss_and_is_stored_again(life):
    assert fetched_tokens(life["damaged"]) == 0
    assert life["damaged"]["text"] == life["cold"]["text"]
    assert "damaged and was removed" in life["second log"]
    assert fetched_tokens(life["stored again"]) > 0
    assert life["stored again"]["text"] == life["cold"]["text"]


def test_pages_are_private_files(life):
    assert life["folder"].stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in list_pages(life["folder"]))


def test_a_document_is_moved_beside_hicache_and_its_moved_pages_are_never_stored(life):
    assert "SemBlend serves this engine" in life["second log"]
    (receipt,) = life["moved"]["meta_info"]["semblend"]
    assert receipt["reused_tokens"] > 100
    assert fetched_tokens(life["moved, flushed"]) <= receipt["exact_tokens"] + 64, "only its exact head"
    (restarted,) = life["restarted"]["meta_info"]["semblend"]
    assert restarted["reused_tokens"] == 0
    assert restarted["exact_tokens"] == life["restarted"]["meta_info"]["cached_tokens"], "pages are exact"
