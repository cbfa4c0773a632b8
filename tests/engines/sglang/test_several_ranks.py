"""A server with several ranks, which is not served: it says why, and answers."""

from __future__ import annotations

from http_server import Server

PROMPT = "The capital of France is"


def test_an_engine_with_several_ranks_starts_says_why_it_reuses_nothing_and_answers(tmp_path):
    """SmolLM2 has three heads of keys: three ranks, each with a scheduler process of its own."""
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0|0"}  # SGLang wants to know where each rank runs on a CPU
    server = Server(tmp_path / "server.log", "--tp", "3", "--semblend", "quality=fast", **ranks)
    try:
        first, again = (server.generate(PROMPT + " the city of lights, which is called") for _ in range(2))
    finally:
        server.stop()
    log = server.log.read_text()
    assert again["text"] == first["text"]
    assert "semblend" not in first["meta_info"]
    said = [line for line in log.splitlines() if "SemBlend reuses nothing in this engine" in line]
    assert said
    assert all("tp_size" in line for line in said)
    assert "SemBlend could not be started" not in log
