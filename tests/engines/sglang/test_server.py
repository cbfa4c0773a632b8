"""SGLang's HTTP server with pages of 16 tokens, started by our launcher: a document is moved there too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from http_server import Server

EXAMPLE = Path(__file__).parents[3] / "examples" / "ask_sglang.py"
DOCUMENT = " ".join(f"Item {n} costs {3 * n + 1} dollars and ships on day {n % 28}." for n in range(16))
HEADS = ("You answer questions.\n", "Read the list of a small shop, then answer the question at its end.\n")
PAGE = 16
QUESTION = "\nQuestion: what does item 5 cost?\nAnswer:"


def test_the_launcher_serves_http_and_moves_a_document(tmp_path):
    # Started as a person starts it; other tests fork their servers.
    flags = ("--semblend", "quality=fast", "--page-size", str(PAGE))
    server = Server(tmp_path / "server.log", *flags, is_warm=False)
    try:
        cold = server.generate(HEADS[1] + DOCUMENT + QUESTION, custom_params={"semblend": {"opt_out": True}})
        server.flush()
        server.generate(HEADS[0] + DOCUMENT + QUESTION)
        moved = server.generate(HEADS[1] + DOCUMENT + QUESTION)
        facts = moved["meta_info"]
        assert facts["cached_tokens"] == (facts["prompt_tokens"] - 1) // PAGE * PAGE
        assert facts["cached_tokens_details"]["host"] > 100, "what we provide is told apart from exact hits"
        assert moved["text"] == cold["text"]
        metrics = server.read_metrics()
        server.flush()
        command = [sys.executable, str(EXAMPLE), f"http://127.0.0.1:{server.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert "cold_fallback (nothing_shared)" in first
        assert "backend_materialized_reuse: of" in second
    finally:
        server.stop()
    log = server.log.read_text()
    assert "SemBlend serves this engine" in log
    assert "[FUZZY] Realized" in log, "the line that sembench summarize-engine-events reads"
    assert "semblend_tokens_total{" in metrics
