"""Building: the same bytes everywhere, transforms that do what they say, decoys that bite, negatives that stay cold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sembench.cli import main
from sembench.files import hash_file
from sembench.manifests.build import ALL_TRANSFORMS, DonorRuns, ManifestBuilder
from sembench.manifests.cases import read_manifest, write_manifest
from sembench.manifests.datasets import (
    PortableRandom,
    Source,
    SourceSelection,
    Task,
    load_sources,
    read_texts,
    write_document,
)
from sembench.manifests.transforms import DECOYS, TransformOptions, cut_segments, reword
from semblend.errors import InputError

TEXTS = read_texts("fixture_texts")["text"]
FIXTURE_SHA256 = "fe66ec560476ee4b0187abaa65328870d9be2e60ec01fbaa0e80fcfb6f85e44a"


@pytest.fixture(scope="module")
def cases():
    return list(ManifestBuilder().build_cases(load_sources(SourceSelection())))


def of(cases, transform):
    return [case for case in cases if case.transform == transform]


def test_the_fixture_is_the_same_bytes_on_every_machine(tmp_path):
    path = tmp_path / "fixture.jsonl"
    assert main(["build", "--profile", "fixture", "--output", str(path), "--quiet"]) == 0
    assert hash_file(path) == FIXTURE_SHA256


def test_the_fixture_does_not_depend_on_the_hash_seed(tmp_path):
    for seed in ("1", "2"):
        command = [sys.executable, "-m", "sembench", "build", "--profile", "fixture", "--output", f"{tmp_path}/{seed}"]
        subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": seed, "PATH": ""})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_every_transform_is_in_the_fixture(cases):
    counts = Counter(case.transform for case in cases)
    assert set(counts) == set(ALL_TRANSFORMS)
    assert all(count >= 7 for count in counts.values()), counts


def test_no_sentence_of_the_fixture_is_used_twice():
    sentences = [s for text in TEXTS for part in text["paragraphs"] for s in part.split(". ") if len(s) > 25]
    assert [s for s, count in Counter(sentences).items() if count > 1] == []


def test_every_fact_of_the_fixture_stands_in_its_text_once():
    for text in TEXTS:
        whole = "\n\n".join(text["paragraphs"])
        for fact in text["facts"]:
            assert whole.count(fact["answer"]) == 1, (text["name"], fact)


def test_answers_stand_in_the_recipient(cases):
    for case in cases:
        if case.answers and case.transform not in ("rag_reorder", "multi_donor_composite"):
            assert case.answers[0] in case.recipient_prompt, case.item_id


def test_item_and_donor_ids_never_mix_and_one_donor_id_means_one_text(cases):
    donors = {}
    for donor in chain.from_iterable(case.donor_prompts for case in cases):
        assert donors.setdefault(donor.donor_id, donor.text) == donor.text
    assert not donors.keys() & {case.item_id for case in cases}


def test_an_exact_repeat_repeats(cases):
    for case in of(cases, "exact_repeat"):
        assert case.recipient_prompt == case.donor_prompts[0].text


def test_reordered_records_come_in_the_opposite_order(cases):
    for case in of(cases, "rag_reorder"):
        donor = case.donor_prompts[0].text
        records = [part.split("\n", 1)[1].split("\n\n")[0] for part in case.recipient_prompt.split("[record ")[1:]]
        assert len(records) == case.metadata["segment_count"] >= 2
        assert all(later < earlier for earlier, later in pairwise(donor.index(record) for record in records))


def test_a_composite_takes_every_passage_from_a_donor_of_its_own(cases):
    for case in of(cases, "multi_donor_composite"):
        assert len(case.donor_prompts) == case.metadata["segment_count"]
        for donor in case.donor_prompts:
            assert donor.text.split("\n\n")[1] in case.recipient_prompt


@pytest.mark.parametrize("name", DECOYS)
def test_a_decoy_plants_a_fact_that_only_the_recipient_has(cases, name):
    for case in of(cases, name):
        donors = "".join(donor.text for donor in case.donor_prompts)
        assert case.planted_fact in case.recipient_prompt
        assert case.planted_fact not in donors
        assert case.donor_fact in donors
        assert case.donor_fact not in case.recipient_prompt
        assert case.answers == (case.planted_fact,)


def test_a_paraphrase_keeps_numbers_and_names_but_hardly_a_run_of_words(cases):
    for case in of(cases, "paraphrase"):
        assert case.answers[0] in case.recipient_prompt
        runs = DonorRuns()
        runs.add(case)
        assert runs.count_shared(case.recipient_prompt) < 12


def test_negative_controls_are_held_out_and_share_nothing_with_any_donor(cases):
    runs = DonorRuns()
    sources = {case.source_id for case in cases if not case.negative_control}
    for case in cases:
        runs.add(case)
    negatives = of(cases, "negative_control")
    assert len(negatives) == 8
    for case in negatives:
        assert case.negative_control
        assert case.source_id not in sources
        assert runs.count_shared(case.recipient_prompt) == 0


def test_a_held_out_document_that_shares_text_with_a_donor_is_left_out_and_counted():
    text = "\n\n".join(TEXTS[0]["paragraphs"])
    sources = [Source("d", "a", text, (Task("q"),)), Source("d", "b", text, (Task("q"),), held_out=True)]
    builder = ManifestBuilder(("exact_repeat", "negative_control"))
    assert [case.transform for case in builder.build_cases([sources])] == ["exact_repeat"]
    assert list(builder.left_out.values()) == [1]


def test_an_unknown_transform_is_refused_with_the_list():
    with pytest.raises(InputError) as told:
        ManifestBuilder(("rag_shuffle",))
    assert "rag_reorder" in told.value.hint


@given(st.text(alphabet="ab. \n", min_size=1, max_size=3000), st.integers(1, 6), st.integers(1, 300))
def test_segments_are_pieces_of_the_text_and_no_more_than_asked(text, most, least):
    segments = cut_segments(text, TransformOptions(most, least))
    assert len(segments) <= most
    assert all(segment in text for segment in segments)


@given(st.text(max_size=300))
def test_rewording_any_text_does_not_fail(text):
    assert isinstance(reword(text), str)


def test_written_documents_are_the_same_every_time_and_differ_by_seed():
    assert write_document(1) == write_document(1)
    assert write_document(1).context != write_document(2).context
    for question, answer in write_document(3, 200).facts:
        assert answer in write_document(3, 200).context
        assert question.endswith("?")


def test_steady_choices_are_even():
    rng = PortableRandom("even")
    counts = Counter(rng.draw_below(10) for _ in range(10_000))
    assert min(counts.values()) > 850
    assert {rng.choose("abc") for _ in range(100)} == {"a", "b", "c"}


# -- LongBench -----------------------------------------------------------------------------------------------------


def longbench(folder, name="qasper", count=6):
    rows = [
        {"input": f"q{at}?", "context": write_document(f"{name}{at}", 400).context, "answers": [f"a{at}"],
         "_id": f"{at}", "dataset": name, "length": 400, "language": "en"}
        for at in range(count)
    ]  # fmt: skip
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_longbench_is_read_from_a_folder_and_some_documents_are_held_out(tmp_path):
    longbench(tmp_path)
    choice = SourceSelection("longbench-v1", ("qasper",), 3, str(tmp_path))
    (sources,) = load_sources(choice)
    assert [source.source_id for source in sources if not source.held_out] == ["0", "1", "2"]
    assert [source.source_id for source in sources if source.held_out] == ["3", "4", "5"]
    assert sources[0].tasks == (Task("q0?", ("a0",)),)


def test_a_small_dataset_still_gives_donors_and_a_held_out_document(tmp_path):
    longbench(tmp_path, count=3)
    (sources,) = load_sources(SourceSelection("longbench-v1", ("qasper",), 10, str(tmp_path)))
    assert [source.held_out for source in sources] == [False, False, True]


def test_longbench_v2_asks_for_a_letter(tmp_path):
    row = {"_id": "x", "question": "Which?", "choice_A": "one", "choice_B": "two", "choice_C": "3", "choice_D": "4",
           "answer": "B", "context": "Long text.", "domain": "code"}  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps([row, row]), encoding="utf-8")
    (sources,) = load_sources(SourceSelection("longbench-v2", (), None, str(tmp_path)))
    assert sources[0].tasks[0].answers == ("B",)
    assert "B. two" in sources[0].tasks[0].question


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (SourceSelection("longbench-v1", ("hotpotqa",), None, "{folder}"), "holds no dataset hotpotqa"),
        (SourceSelection("longbench-v1", ("qasper",), None, "{folder}/none"), "is not a folder"),
        (SourceSelection("longbench-v1", ("broken",), None, "{folder}"), r"broken\.jsonl line 1 is not JSON"),
        (SourceSelection("fixture", max_items=0), "--max-items-per-dataset is 0"),
        (SourceSelection("longbench-v7"), "no profile"),
    ],
)
def test_wrong_sources_are_told_in_one_line(tmp_path, choice, message):
    longbench(tmp_path)
    (tmp_path / "broken.jsonl").write_text("{\n", encoding="utf-8")
    given = SourceSelection(
        choice.profile, choice.datasets, choice.max_items, choice.longbench_dir.format(folder=tmp_path)
    )
    with pytest.raises(InputError, match=message):
        list(load_sources(given))


# -- the commands --------------------------------------------------------------------------------------------------


def test_a_frozen_build_checks_and_changes_nothing(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    words = ["build", "--profile", "synthetic-v1", "--max-items-per-dataset", "2", "--output", str(path), "--quiet"]
    assert main(words) == 0
    assert main([*words, "--frozen"]) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("granary", "cellar", 1), encoding="utf-8")
    before = path.read_bytes()
    assert main([*words, "--frozen"]) == 2
    assert "would be built differently" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_building_prints_one_json_line_and_the_checksum_agrees(tmp_path, capsys):
    path = tmp_path / "m.jsonl"
    main(["build", "--profile", "fixture", "--output", str(path), "--quiet"])
    built = json.loads(capsys.readouterr().out)
    assert main(["checksum-manifest", "--manifest", str(path)]) == 0
    summed = json.loads(capsys.readouterr().out)
    assert (built["sha256"], built["items"]) == (summed["sha256"], summed["items"])
    assert summed["benchmark_versions"] == ["sembench.2026.11"]


def test_an_audit_passes_the_fixture_and_finds_a_negative_control_that_is_none(tmp_path, capsys, cases):
    path = tmp_path / "m.jsonl"
    write_manifest(path, cases)
    assert main(["audit-manifest", "--manifest", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    spoiled = next(row for row in rows if row["transform"] == "negative_control")
    spoiled["recipient_prompt"] = "x " + spoiled["donor_prompts"][0]["text"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    capsys.readouterr()
    assert main(["audit-manifest", "--manifest", str(path)]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["findings"] == {"phantom_collision": 1}
    assert spoiled["item_id"] in told.err


def test_datasets_of_a_profile_that_has_none_are_refused(tmp_path, capsys):
    assert main(["build", "--profile", "fixture", "--datasets", "qasper", "--output", str(tmp_path / "m")]) == 2
    assert "hint:" in capsys.readouterr().err


def test_a_manifest_built_from_real_longbench_has_clean_negatives(tmp_path, data_dir, capsys):
    path = tmp_path / "m.jsonl"
    words = ["build", "--profile", "longbench-v1", "--longbench-dir", str(data_dir / "longbench")]
    words += ["--datasets", "qasper", "hotpotqa", "qmsum", "lcc", "--max-items-per-dataset", "3"]
    words += ["--output", str(path), "--quiet"]
    assert main(words) == 0
    assert main(["audit-manifest", "--manifest", str(path)]) == 0, capsys.readouterr().err
    assert {case.dataset for case in read_manifest(path)} == {"qasper", "hotpotqa", "qmsum", "lcc"}
