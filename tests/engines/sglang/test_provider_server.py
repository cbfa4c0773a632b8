"""A provider of a third party in SGLang's own HTTP server: named to the launcher, found on PYTHONPATH, asked, believed
in nothing but equal tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from http_server import Server

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCUMENT = " ".join(f"Lot {n} holds {5 * n + 2} boxes and leaves on day {n % 28}." for n in range(16))
QUESTION = "\nQuestion: what does lot 5 hold?\nAnswer:"
KNOWN, ASKED, OTHER = (
    "List of a harbor:\n",
    "Here is what the warehouse wrote down:\n",
    "Nobody shares a word of this",
)
NO_DONORS_OF_OUR_OWN = ("--semblend", "donor_min_new_tokens=1000000")


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """Only the provider knows earlier requests: the cache keeps no donors by itself."""
    log = tmp_path_factory.mktemp("provider") / "server.log"
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    server = Server(
        log, "--semblend-provider", "semantic_provider:SharedPieces", *NO_DONORS_OF_OUR_OWN,
        *("--semblend", "provider_deadline_ms=60000", "--semblend", "quality=fast"), PYTHONPATH=path,
    )  # fmt: skip
    try:
        # A request that opts out is not told to a provider, who would propose it otherwise: it shares everything.
        found = {"cold": server.generate(ASKED + DOCUMENT + QUESTION, custom_params={"semblend": {"opt_out": True}})}
        server.flush()
        found["known"] = server.generate(KNOWN + DOCUMENT + QUESTION)
        found["asked"] = server.generate(ASKED + DOCUMENT + QUESTION)
        found["other salt"] = server.generate(ASKED + DOCUMENT + QUESTION, salt="ben")
        found["other text"] = server.generate(OTHER + " because it is about something else." * 12)
    finally:
        server.stop()
    return found | {"log": log.read_text()}


def count_reused(answer: dict) -> int:
    (receipt,) = answer["meta_info"]["semblend"]
    return int(receipt["reused_tokens"])


def test_what_a_provider_proposes_is_moved_to_where_the_prompt_has_it(life):
    assert count_reused(life["known"]) == 0
    assert count_reused(life["asked"]) > 100
    assert life["asked"]["text"] == life["cold"]["text"]
    assert "semantic prefix for" in life["log"]


def test_a_proposal_does_not_cross_a_salt_and_reuses_no_other_text(life):
    assert count_reused(life["other salt"]) == 0
    assert life["other salt"]["text"] == life["cold"]["text"]
    assert count_reused(life["other text"]) == 0


def test_the_server_runs_without_a_warning_about_the_provider(life):
    assert "the semantic provider" not in life["log"]
