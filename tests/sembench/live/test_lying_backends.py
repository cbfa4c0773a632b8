"""A backend that lies about reuse is caught: by planted facts, by its cold answers, by its own counters."""

from __future__ import annotations

from live_cases import gateway_code, manifest, run_gateway
from lying_backend import Lie, LyingBackend


def contradictions(result):
    return [line for record in result.requests for line in record.contradictions]


def test_an_honest_backend_is_believed(tmp_path):
    with LyingBackend().serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    assert contradictions(result) == []
    assert result.paired["hit_rate"] == 1.0
    assert result.paired["pairs_used"] == 5
    assert result.paired["wrong_kv_pairs"] == 0
    assert result.paired["hit_only_ttft_speedup_median"] > 2
    assert result.aggregate["negative_control_backend_confirmed_rate"] == 0.0
    assert result.aggregate["planted_fact_answered_rate"] == 1.0
    assert result.aggregate["mean_cold_f1"] == 1.0
    assert result.config["isolation_verified"] is True
    assert set(result.aggregate["confirmation_sources"]) == {"receipt", "usage", "prometheus"}


def test_claimed_reuse_that_no_counter_and_no_usage_knows_of_is_not_counted(tmp_path):
    with LyingBackend(Lie.CLAIMS).serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    told = contradictions(result)
    assert any("the counters did not move" in line for line in told)
    assert any("usage counts 0 cached tokens" in line for line in told)
    assert result.paired["hit_rate"] == 0.0
    warm = [record for record in result.requests if record.arm == "warm" and not record.negative_control]
    assert all(record.reused_tokens > 0 and record.backend_confirmed_tokens == 0 for record in warm)
    # where nothing may be reused, the claim itself counts against the backend, whatever its counters say
    assert result.aggregate["negative_control_backend_confirmed_rate"] > 0.5


def test_reuse_that_receipt_usage_and_counters_all_invent_is_caught_by_what_texts_share_and_by_the_clock(tmp_path):
    with LyingBackend(Lie.CLAIMS_EVERYWHERE).serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    negatives = [record for record in result.requests if record.arm == "warm" and record.negative_control]
    assert all("donors share 0% of the text" in record.contradictions[0] for record in negatives)
    assert result.aggregate["negative_control_backend_confirmed_rate"] > 0.5
    hits = result.paired["hit_rate"] * result.paired["hit_rate_n"]
    assert result.paired["hits_without_saving"] >= hits - 1  # one may be fast by chance on a busy machine


def test_the_wrong_donors_kv_answers_the_donors_fact_and_leaves_the_cold_answer(tmp_path):
    with LyingBackend(Lie.WRONG_DONOR).serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    assert contradictions(result) == []  # its books are in order; only the answers give it away
    assert result.paired["wrong_kv_pairs"] == 3
    assert result.paired["planted_fact_lost_pairs"] == 3
    assert result.aggregate["donor_fact_answered_rate"] == 1.0
    warm = [record for record in result.requests if record.arm == "warm" and not record.negative_control]
    assert all(record.cold_f1 == 0.0 and record.first_divergence == 0 for record in warm)
    assert result.paired["rerun_vs_cold_f1_mean"] == 1.0  # so it is not noise
    assert result.aggregate["false_safe_rate"] == 1.0
    assert result.aggregate["quality_pass_rate"] < 0.5


def test_being_faster_by_luck_is_not_a_hit(tmp_path):
    with LyingBackend(Lie.LUCKY).serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    assert result.paired["blended_ttft_speedup_median"] > 2
    assert result.paired["hit_rate"] == 0.0
    assert result.paired["hit_only_ttft_speedup_median"] is None
    assert result.aggregate["backend_confirmed_tokens"] == 0
    assert result.paired["faster_without_reuse"] > 0
    # unrelated prompts gained as much, so whatever it was, it was not reuse
    assert result.paired["negative_control_ttft_speedup_median"] > 2


def test_a_tenant_that_is_served_anothers_kv_is_a_leak(tmp_path):
    flags = ("--tenant-pairs", "2")
    with LyingBackend(Lie.LEAKS_TENANTS).serving() as server:
        leaking = run_gateway(server.url, tmp_path, *flags)
        assert "tenant-b" in server.seen_tenants
    with LyingBackend().serving() as server:
        tight = run_gateway(server.url, tmp_path, *flags)
    assert leaking.aggregate["cross_tenant_count"] == tight.aggregate["cross_tenant_count"] == 2
    assert leaking.aggregate["cross_tenant_backend_confirmed_rate"] == 1.0
    assert any("of another tenant were served" in line for line in contradictions(leaking))
    assert tight.aggregate["cross_tenant_backend_confirmed_rate"] == 0.0
    assert contradictions(tight) == []


def test_a_cache_that_survives_its_isolation_taints_every_pair(tmp_path, capsys):
    with LyingBackend(Lie.REMEMBERS).serving() as server:
        result = run_gateway(server.url, tmp_path, "--paired")
    assert result.config["isolation_verified"] is False
    assert result.paired["pairs_used"] == 0
    assert result.paired["hit_rate"] is None
    assert any("where no donor was primed" in line for line in contradictions(result))
    assert "not to be trusted" in capsys.readouterr().err


def test_a_server_that_dies_half_way_leaves_no_result_and_resume_goes_on(tmp_path, capsys):
    cases = manifest(tmp_path)
    backend = LyingBackend(die_after=9)
    with backend.serving() as server:
        assert gateway_code(server.url, tmp_path, "--paired", cases=cases) == 1
        assert "--resume" in capsys.readouterr().err
        assert not (tmp_path / "result.json").exists()
        kept = (tmp_path / "result.json.partial.jsonl").read_text().splitlines()
        assert len(kept) >= 2  # a header and at least one case
        backend.die_after = None
        before = backend.answered
        result = run_gateway(server.url, tmp_path, "--paired", "--resume", cases=cases)
    assert len(result.requests) == 15
    assert result.aggregate["error_count"] == 0
    assert backend.answered - before < 3 + 5 * 4  # warm-up, probes, and not every case once more
    assert not (tmp_path / "result.json.partial.jsonl").exists()


def test_a_diary_of_another_run_is_not_continued(tmp_path, capsys):
    cases = manifest(tmp_path)
    with LyingBackend(die_after=9).serving() as server:
        gateway_code(server.url, tmp_path, "--paired", cases=cases)
        assert gateway_code(server.url, tmp_path, "--resume", cases=cases) == 2
    assert "was begun with arms" in capsys.readouterr().err


def test_a_forgotten_resume_does_not_delete_what_was_measured(tmp_path, capsys):
    cases = manifest(tmp_path, 1, 1)
    backend = LyingBackend(die_after=5)
    with backend.serving() as server:
        gateway_code(server.url, tmp_path, cases=cases)
        backend.die_after = None
        run_gateway(server.url, tmp_path, cases=cases)
    assert (tmp_path / "result.json.partial.jsonl.old").exists()
    assert "--resume would have gone on" in capsys.readouterr().err


def test_a_diary_that_was_cut_in_the_middle_of_a_line_is_continued(tmp_path):
    cases = manifest(tmp_path)
    backend = LyingBackend(die_after=9)
    with backend.serving() as server:
        gateway_code(server.url, tmp_path, "--paired", cases=cases)
        diary = tmp_path / "result.json.partial.jsonl"
        diary.write_text(diary.read_text() + '{"item_id": "p2", "rec')
        backend.die_after = None
        result = run_gateway(server.url, tmp_path, "--paired", "--resume", cases=cases)
    assert [record.item_id for record in result.requests[::3]] == ["p0", "p1", "p2", "n0", "n1"]


def test_a_stream_that_is_cut_is_an_error_of_that_request_and_not_an_answer(tmp_path, capsys):
    with LyingBackend(cut_after=2).serving() as server:
        assert gateway_code(server.url, tmp_path) == 1
    assert "the stream was cut" in capsys.readouterr().err


def test_a_server_that_knows_no_salts_is_told_of_in_words(tmp_path, capsys):
    with LyingBackend(refuse_salt=True).serving() as server:
        assert gateway_code(server.url, tmp_path) == 2
        assert "--reset-url" in capsys.readouterr().err
        result = run_gateway(server.url, tmp_path, "--paired", "--reset-url", server.url)
        assert "/reset_prefix_cache" in server.paths
    assert result.config["isolation"] == "flush"
    assert result.paired["hit_rate"] == 1.0


def test_placement_is_read_from_headers_and_is_not_reuse(tmp_path):
    with LyingBackend(Lie.LUCKY, route="semantic_placement").serving() as server:
        result = run_gateway(server.url, tmp_path)
    assert result.aggregate["semantic_placement_rate_by_request"] == 1.0
    assert result.aggregate["negative_control_semantic_placement_rate"] == 1.0
    assert result.aggregate["backend_confirmed_tokens"] == 0


def test_a_donor_is_primed_at_its_own_url(tmp_path):
    with LyingBackend().serving() as worker, LyingBackend().serving() as gateway:
        result = run_gateway(gateway.url, tmp_path, "--donor-url", worker.url)
        assert worker.answered == 5
    assert result.aggregate["backend_confirmed_tokens"] == 0  # they share nothing, and nobody pretends they do


def test_cases_run_side_by_side_keep_to_themselves(tmp_path):
    throughput = tmp_path / "throughput.json"
    flags = ("--concurrency", "3", "--min-donor-gap-requests", "1", "--throughput-output", str(throughput))
    with LyingBackend().serving() as server:
        result = run_gateway(server.url, tmp_path, *flags)
    assert [record.item_id for record in result.requests] == ["p0", "p1", "p2", "n0", "n1"]
    assert contradictions(result) == []
    assert result.aggregate["backend_confirmed_rate_by_request"] == 0.6
    assert '"concurrency": 3' in throughput.read_text()


def test_the_order_of_arms_is_drawn_and_the_same_seed_draws_the_same(tmp_path):
    import random

    from sembench.live.run import PAIRED_ARMS

    def order(seed, item):
        arms = list(PAIRED_ARMS)
        random.Random(f"{seed}:{item}").shuffle(arms)
        return tuple(arms)

    assert len({order(0, f"p{at}") for at in range(40)}) == 6
    assert [order(7, "p1")] * 2 == [order(7, "p1"), order(7, "p1")]


def test_an_unknown_model_is_refused_before_anything_is_asked(tmp_path, capsys):
    with LyingBackend().serving() as server:
        words = ["--model", "other"]
        assert gateway_code(server.url, tmp_path, *words) == 2
        assert server.answered == 0
    assert "the server serves liar, not other" in capsys.readouterr().err
