"""Offline replay: what counts as exact, proposed and eligible, and that no planner can talk its way past the check."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.cli import COMMANDS, build_parser, main
from sembench.manifests.blocks import HashSet, hash_content, hash_every_offset, hash_prefixes
from sembench.manifests.cases import Case, DonorPrompt, write_manifest
from sembench.offline.planners import PlannerOptions, Proposal, make_planner_factory
from sembench.offline.replay import ReplayStore, TokenSpool, check_proposal, choose_tokenizer
from sembench.result import read_result
from semblend.errors import InputError
from semblend.span import Span
from semblend.text.tokenization import StableTokenizer
from tools.reference.sembench_pages import PAGE, render
from tools.reference.semblend_pages import commands_of, options_of

BLOCK = 4
tokens_of = st.lists(st.integers(0, 5), max_size=60).map(lambda ids: np.array(ids, dtype=np.int32))


def ids(*values):
    return np.array(values, dtype=np.int32)


@pytest.fixture
def spool():
    made = TokenSpool()
    yield made
    made.close()


# -- blocks --------------------------------------------------------------------------------------------------------


@given(tokens_of, st.integers(1, 9))
def test_block_hashes_agree_with_comparing_blocks(tokens, size):
    blocks = [tuple(tokens[at : at + size].tolist()) for at in range(0, len(tokens) - size + 1, size)]
    content, prefix = hash_content(tokens, size).tolist(), hash_prefixes(tokens, size).tolist()
    assert len(content) == len(prefix) == len(blocks)
    for one, left in enumerate(blocks):
        for two, right in enumerate(blocks):
            assert (content[one] == content[two]) == (left == right)
            assert (prefix[one] == prefix[two]) == (one == two)


@given(tokens_of, st.integers(1, 9))
def test_rolling_hashes_are_the_content_hashes_of_every_window(tokens, size):
    rolled = hash_every_offset(tokens, size).tolist()
    assert rolled == [int(hash_content(tokens[at : at + size], size)[0]) for at in range(len(tokens) - size + 1)]


@given(st.lists(st.lists(st.integers(0, 50))), st.lists(st.integers(0, 50)))
def test_a_hash_set_holds_what_was_added(parts, asked):
    held = HashSet()
    for part in parts:
        held.add(np.array(part, dtype=np.uint64))
    known = {value for part in parts for value in part}
    assert held.contains(np.array(asked, dtype=np.uint64)).tolist() == [value in known for value in asked]


# -- the check -----------------------------------------------------------------------------------------------------


def test_equal_tokens_of_one_piece_are_eligible(spool):
    spool.add("d", ids(9, 1, 2, 3, 4, 5, 6, 7, 8))
    verdict = check_proposal(ids(1, 2, 3, 4, 5, 6, 7, 8), Proposal((Span("d", 1, 0, 8),)), spool, BLOCK)
    assert (verdict.candidate_blocks, verdict.eligible_blocks, verdict.wrong_tokens) == (2, 2, 0)


def test_an_unequal_token_is_wrong_and_spoils_its_block(spool):
    spool.add("d", ids(1, 2, 3, 99, 5, 6, 7, 8))
    verdict = check_proposal(ids(1, 2, 3, 4, 5, 6, 7, 8), Proposal((Span("d", 0, 0, 8),)), spool, BLOCK)
    assert (verdict.candidate_blocks, verdict.eligible_blocks) == (2, 1)
    assert (verdict.candidate_tokens, verdict.eligible_tokens, verdict.wrong_tokens) == (8, 7, 1)


def test_a_block_from_two_donors_is_a_candidate_but_not_eligible_as_a_block(spool):
    spool.add("a", ids(1, 2))
    spool.add("b", ids(3, 4))
    spans = (Span("a", 0, 0, 2), Span("b", 0, 2, 2))
    verdict = check_proposal(ids(1, 2, 3, 4), Proposal(spans), spool, BLOCK)
    assert (verdict.candidate_blocks, verdict.eligible_blocks, verdict.eligible_tokens) == (1, 0, 4)


def test_adjacent_spans_of_one_donor_count_as_one_piece(spool):
    spool.add("a", ids(1, 2, 3, 4))
    verdict = check_proposal(ids(1, 2, 3, 4), Proposal((Span("a", 0, 0, 2), Span("a", 2, 2, 2))), spool, BLOCK)
    assert verdict.eligible_blocks == 1


@pytest.mark.parametrize(
    "span", [Span("nobody", 0, 0, 4), Span("d", -1, 0, 4), Span("d", 6, 0, 4), Span("d", 0, 6, 4), Span("d", 0, -2, 4)]
)
def test_tokens_that_do_not_exist_are_wrong_and_nothing_breaks(spool, span):
    spool.add("d", ids(*range(8)))
    verdict = check_proposal(ids(*range(8)), Proposal((span,)), spool, BLOCK)
    assert verdict.wrong_tokens >= 2
    assert verdict.eligible_blocks == 0


wild_spans = st.lists(st.tuples(st.integers(-3, 60), st.integers(-3, 60), st.integers(0, 60)), max_size=5)


@given(tokens_of, tokens_of, wild_spans)
def test_whatever_is_proposed_eligible_tokens_are_equal_tokens(donor, prompt, wild):
    donors = TokenSpool()
    donors.add("d", donor)
    spans = tuple(Span("d", *values) for values in wild)
    verdict = check_proposal(prompt, Proposal(spans), donors, BLOCK)
    donors.close()
    assert 0 <= verdict.eligible_tokens <= verdict.candidate_tokens <= len(prompt)
    assert verdict.eligible_blocks <= verdict.candidate_blocks <= len(prompt) // BLOCK
    held = {
        target
        for span in spans
        for target, own in ((span.target_start + at, span.donor_start + at) for at in range(span.length))
        if 0 <= target < len(prompt) and 0 <= own < len(donor) and donor[own] == prompt[target]
    }  # fmt: skip
    assert verdict.eligible_tokens <= len(held)


# -- stores and planners -------------------------------------------------------------------------------------------

TEXT = " ".join(f"word{number}" for number in range(400))


def replay(planner, case, *others):
    with closing(ReplayStore(make_planner_factory(planner, PlannerOptions())(), StableTokenizer(), 16)) as store:
        for name, text in others:
            store.add(name, text)
        for donor in case.donor_prompts:
            store.add(donor.donor_id, donor.text)
        return store.replay(case, "single")


def shifted(text=TEXT):
    return Case("i", "d", "s", "t", (DonorPrompt("a", TEXT),), f"Three more words. {text}")


def test_a_shifted_document_is_missed_by_prefix_and_grid_and_found_by_ours():
    found = replay("ours", shifted())
    assert found.exact_prefix_hit_blocks == 0
    assert found.exact_hit_blocks < found.total_blocks * 0.1
    assert found.semantic_eligible_blocks > found.total_blocks * 0.9
    assert (found.wrong_tokens, found.semblend_found, found.donor_ids) == (0, True, ("a",))


@pytest.mark.parametrize(
    ("planner", "eligible"), [("none", False), ("block-hash", False), ("lmcache-chunks", True), ("ours", True)]
)
def test_every_built_in_planner_runs_and_proposes_only_equal_tokens(planner, eligible):
    found = replay(planner, shifted())
    assert found.wrong_tokens == 0
    assert (found.semantic_eligible_tokens > 200) == eligible


def test_block_hash_proposes_exactly_what_the_exact_baseline_counts():
    case = Case("i", "d", "s", "t", (DonorPrompt("a", TEXT),), TEXT[:1500] + " and then something else")
    found = replay("block-hash", case)
    assert found.semantic_eligible_blocks == found.exact_hit_blocks > 0


def test_a_prefix_hit_ends_at_the_first_block_that_differs():
    tokens = StableTokenizer().pieces(TEXT)
    middle = "".join(tokens[: 16 * 10]) + " other" + "".join(tokens[16 * 10 + 1 :])
    found = replay("none", Case("i", "d", "s", "t", (DonorPrompt("a", TEXT),), middle))
    assert found.exact_prefix_hit_blocks == 10
    assert found.exact_hit_blocks > 10


def test_one_donor_only_when_several_are_switched_off():
    half = len(TEXT) // 2
    case = Case("i", "d", "s", "t", (DonorPrompt("a", TEXT[:half]), DonorPrompt("b", "x " + TEXT[half:])), TEXT)
    for several in (True, False):
        planner = make_planner_factory("ours", PlannerOptions(multi_donor=several))()
        with closing(ReplayStore(planner, StableTokenizer(), 16)) as store:
            for donor in case.donor_prompts:
                store.add(donor.donor_id, donor.text)
            assert len(store.replay(case, "single").donor_ids) == (2 if several else 1)


def test_one_name_for_two_texts_keeps_both():
    with closing(ReplayStore(make_planner_factory("ours", PlannerOptions())(), StableTokenizer(), 16)) as store:
        assert store.add("donor", TEXT, "first")
        assert not store.add("donor", TEXT, "second")
        assert store.add("donor", TEXT.replace("word", "term"), "third")
        assert len(store.donors) == 2
        case = Case("i", "d", "s", "t", (), "x " + TEXT.replace("word", "term"))
        assert store.replay(case, "single").donor_ids == ("donor@third",)


def test_a_planner_that_lies_gets_wrong_tokens_and_no_eligible_block(tmp_path, monkeypatch):
    (tmp_path / "lying_planner.py").write_text(
        "from sembench.offline.planners import Proposal\nfrom semblend.span import Span\n"
        "class Liar:\n"
        "    def __init__(self, options): pass\n"
        "    def register(self, donor_id, prompt): pass\n"
        "    def propose(self, prompt): return Proposal((Span('a', 0, 0, len(prompt.token_ids)),), 1.0)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    manifest = tmp_path / "m.jsonl"
    write_manifest(manifest, [Case("i", "d", "s", "t", (DonorPrompt("a", TEXT),), TEXT.replace("word", "term"))])
    output = tmp_path / "r.json"
    words = ["run-offline", "--manifest", str(manifest), "--output", str(output), "--quiet"]
    assert main([*words, "--planner", "lying_planner:Liar", "--semblend-path", str(tmp_path)]) == 0
    found = read_result(output).aggregate
    assert found["semantic_candidate_block_rate"] == 1.0
    assert found["semantic_eligible_block_rate"] < 0.05
    assert found["wrong_tokens"] > 300


@pytest.mark.parametrize(
    ("name", "message"),
    [("nonsense", "no planner"), ("no_such_module:X", "no_such_module"), ("json:Nothing", "has no Nothing"),
     ("json:JSONDecoder", "has no method register")],
)  # fmt: skip
def test_a_planner_that_cannot_be_used_is_told_before_the_work(name, message):
    with pytest.raises(InputError, match=message):
        make_planner_factory(name, PlannerOptions())


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fixture(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("manifests") / "fixture.jsonl"
    assert main(["build", "--profile", "fixture", "--output", str(path), "--quiet"]) == 0
    return path


def run(manifest: Path, output: Path, *flags: str) -> int:
    return main(["run-offline", "--manifest", str(manifest), "--output", str(output), "--quiet", *flags])


@pytest.mark.parametrize("store", ["one", "per-item"])
def test_on_the_fixture_the_lift_is_clearly_positive_and_negatives_are_zero(fixture, tmp_path, store):
    output = tmp_path / "new" / "r.json"
    assert run(fixture, output, "--block-size", "16", "--store", store) == 0
    found = read_result(output)
    assert found.aggregate["semantic_eligible_lift"] > 0.4
    assert found.aggregate["semantic_eligible_lift_ci"][0] > 0.3
    assert found.aggregate["wrong_tokens"] == 0
    assert found.aggregate["negative_control_semantic_eligible_rate"] == 0.0
    assert found.aggregate["negative_control_semantic_eligible_tokens"] == 0
    assert found.aggregate["exact_prefix_block_hit_rate"] <= found.aggregate["exact_block_hit_rate"]
    assert found.aggregate["backend_confirmed_block_rate"] is None
    assert found.by_transform["exact_repeat"]["exact_block_hit_rate"] == 1.0
    assert not list(output.parent.glob("*.partial*"))


def test_the_result_says_where_it_comes_from(fixture, tmp_path):
    output = tmp_path / "r.json"
    run(fixture, output, "--max-items", "3", "--run-id", "r7", "--backend-id", "b", "--arm", "cold")
    found = read_result(output)
    assert found.run is not None
    assert (found.run["run_id"], found.run["backend_id"], found.run["arm"]) == ("r7", "b", "cold")
    assert len(found.run["manifest_sha256"]) == 64
    assert found.config["tokenizer"] == {"asked": "stable", "used": "stable", "stand_in": False, "note": ""}
    assert len(found.requests) == 3


def test_flags_of_the_older_benchmark_are_accepted(fixture, tmp_path):
    words = (
        *("--block-size", "32", "--tokenizer", "stable", "--max-items", "4", "--semblend-embedder", "jaccard"),
        *("--semblend-min-similarity", "0.0", "--semblend-min-reuse-ratio", "0.25", "--disable-multi-donor"),
        *("--run-id", "x", "--arm", "single", "--baseline-id", "y", "--backend-id", "b", "--engine-version", "z"),
        "--skip-verify",
    )
    assert run(fixture, tmp_path / "r.json", *words) == 0


def test_an_interrupted_run_goes_on_where_it_stopped(fixture, tmp_path, monkeypatch, capsys):
    output, replayed, real = tmp_path / "r.json", [], ReplayStore.replay

    def breaking(self, case, arm):
        if len(replayed) == 5:
            raise KeyboardInterrupt
        replayed.append(case.item_id)
        return real(self, case, arm)

    monkeypatch.setattr(ReplayStore, "replay", breaking)
    assert run(fixture, output, "--max-items", "9") == 130
    assert not output.exists()

    def counting(self, case, arm):
        replayed.append(case.item_id)
        return real(self, case, arm)

    monkeypatch.setattr(ReplayStore, "replay", counting)
    assert run(fixture, output, "--max-items", "9", "--resume") == 0
    assert len(replayed) == len(set(replayed)) == 9
    assert [record.item_id for record in read_result(output).requests] == replayed
    assert "going on after 5 of 9" in capsys.readouterr().err


def test_a_resumed_run_with_other_arguments_is_refused(fixture, tmp_path, monkeypatch, capsys):
    def breaking(self, case, arm):
        raise KeyboardInterrupt

    monkeypatch.setattr(ReplayStore, "replay", breaking)
    run(fixture, tmp_path / "r.json")
    assert run(fixture, tmp_path / "r.json", "--resume", "--block-size", "32") == 2
    assert "block_size" in capsys.readouterr().err


def test_mixed_benchmark_versions_are_refused_unless_asked_for(fixture, tmp_path, capsys):
    rows = [json.loads(line) for line in fixture.read_text(encoding="utf-8").splitlines()[:3]]
    rows[1]["benchmark_version"] = "sembench.2025.01"
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run(path, tmp_path / "r.json") == 2
    assert "sembench.2025.01" in capsys.readouterr().err
    assert run(path, tmp_path / "r.json", "--skip-verify") == 0


def test_a_bad_line_stops_the_run_before_it_starts_and_skip_bad_counts_it(fixture, tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(fixture.read_text(encoding="utf-8").splitlines()[:2]) + "\n{}\n", encoding="utf-8")
    assert run(path, tmp_path / "r.json") == 2
    assert "line 3: field" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
    assert run(path, tmp_path / "r.json", "--skip-bad") == 0
    assert read_result(tmp_path / "r.json").config["bad_lines"] == 1


def test_an_empty_manifest_is_refused(tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text("", encoding="utf-8")
    assert run(tmp_path / "m.jsonl", tmp_path / "r.json") == 2
    assert "holds no cases" in capsys.readouterr().err


def test_distractors_are_in_the_store_and_the_right_donor_is_still_found(fixture, tmp_path):
    for count in ("0", "100"):
        assert run(fixture, tmp_path / f"{count}.json", "--distractors", count) == 0
    few, many = (read_result(tmp_path / f"{count}.json").aggregate for count in ("0", "100"))
    assert few["semantic_eligible_tokens"] == many["semantic_eligible_tokens"]


def test_another_manifest_can_be_the_distractors(fixture, tmp_path):
    assert run(fixture, tmp_path / "r.json", "--max-items", "2", "--distractors", str(fixture)) == 0


# -- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_model_name_that_is_not_at_hand_gets_a_stand_in_that_is_told_and_kept(fixture, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sembench.offline.replay._load_pulled_model", lambda name: None)
    output = tmp_path / "r.json"
    assert run(fixture, output, "--max-items", "2", "--tokenizer", "Nobody/has-this-model") == 0
    assert "warning: Nobody/has-this-model is not on this machine" in capsys.readouterr().err
    used = read_result(output).config["tokenizer"]
    assert (used["asked"], used["used"], used["stand_in"]) == ("Nobody/has-this-model", "stable", True)


def test_a_stand_in_can_be_forbidden(fixture, tmp_path, capsys):
    assert run(fixture, tmp_path / "r.json", "--tokenizer", "Nobody/has-this-model", "--no-tokenizer-stand-in") == 2
    assert "not in the local Hugging Face cache" in capsys.readouterr().err


def test_a_path_that_is_not_there_gets_no_stand_in():
    with pytest.raises(InputError):
        choose_tokenizer("./no/such/tokenizer.json")


def test_tiktoken_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(Exception, match="tiktoken"):
        choose_tokenizer("tiktoken:cl100k_base")


# -- the command line ----------------------------------------------------------------------------------------------


def test_a_command_is_imported_only_when_it_is_asked_for():
    script = (
        "import sys; from sembench.cli import main; main(['checksum-manifest', '--help'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('sembench.commands.')), file=sys.stderr)\n"
        "heavy = {'httpx', 'torch', 'matplotlib', 'kubernetes', 'tokenizers', 'transformers', 'numba', 'fastapi'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["['sembench.commands.manifests']", "[]"]


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name.rpartition(".")[2].replace("_", "-") in told for name in COMMANDS)
    assert build_parser().parse_args(["build", "--profile", "fixture", "--output", "x"]).command == "build"


def test_an_unknown_command_is_a_mistake_with_a_hint(capsys):
    assert main(["run-everything"]) == 2
    assert "hint:" in capsys.readouterr().err
    assert main([]) == 2


def test_the_reference_page_is_what_the_parser_would_write_now():
    page = Path(__file__).parents[3] / "docs" / "reference" / PAGE
    assert page.read_text(encoding="utf-8") == render(), (
        "stale: python -m tools.reference.sembench_pages docs/reference"
    )


def test_every_flag_of_every_command_has_help():
    for name, command in commands_of(build_parser()).items():
        for action in options_of(command):
            assert action.help, f"sembench {name} {action.option_strings or action.dest}"
