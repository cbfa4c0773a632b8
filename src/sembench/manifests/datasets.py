"""The documents that cases are made of: the fixture's, made-up ones, and LongBench."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from sembench.files import open_text
from semblend.errors import InputError, MissingDependencyError

# -- random choices --------------------------------------------------------------------------------------------------
# Random choices that stay the same on every machine and in every version of Python.
#
# The standard library promises that for ``random()`` alone, not for ``choice`` or ``shuffle``; a manifest whose
# checksum is pinned needs more.

T = TypeVar("T")
_MASK = (1 << 64) - 1


class PortableRandom:
    """The random generator SplitMix64, seeded by words.

    >>> rng = PortableRandom("fixture", 3)
    >>> [rng.draw_below(100) for _ in range(4)]
    [90, 20, 79, 88]
    """

    def __init__(self, *seed: object) -> None:
        packed = "\x1f".join(str(part) for part in seed).encode("utf-8")
        self._state = int.from_bytes(hashlib.sha256(packed).digest()[:8], "big")

    def draw_bits(self) -> int:
        """Return 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def draw_below(self, limit: int) -> int:
        """Return a whole number in [0, limit), evenly distributed."""
        return (self.draw_bits() * limit) >> 64

    def choose(self, items: Sequence[T]) -> T:
        return items[self.draw_below(len(items))]


# -- texts -----------------------------------------------------------------------------------------------------------


def read_texts(name: str) -> dict[str, Any]:
    """Return the data of a TOML file beside this module: ``fixture_texts`` or ``case_words``."""
    return tomllib.loads((resources.files(__package__) / f"{name}.toml").read_text(encoding="utf-8"))


# -- made-up documents -----------------------------------------------------------------------------------------------
# Writes documents of any length, for the profile synthetic-v1 and for distractors.
#
# Sentences are drawn from frames and filled with names, places, goods and numbers. Every frame has slots a few words
# apart, so that two documents share words and forms, as real ones do, but hardly ever a run of 32 tokens.

WORDS: Mapping[str, Mapping[str, Any]] = read_texts("case_words")
_WRITER: Mapping[str, list[str]] = WORDS["writer"]
_SLOT = re.compile(r"\{(\w+)\}")
_SENTENCES_A_PARAGRAPH = 6
_WORDS_A_SENTENCE = 19


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """A made-up document and the three (question, answer) pairs that it contains."""

    context: str
    facts: tuple[tuple[str, str], ...]


def write_document(seed: object, words: int = 800) -> WrittenDocument:
    """Return a document of about ``words`` words; the same seed gives the same text everywhere."""
    rng = PortableRandom("sembench.writer.v1", seed)
    count = max(8, words // _WORDS_A_SENTENCE)
    sentences = [_write_sentence(rng) for _ in range(count)]
    facts = []
    for at, (question, planted, answer) in zip((count // 6, count // 2, count - 2), _plant_facts(rng), strict=True):
        sentences[at] = planted
        facts.append((question, answer))
    paragraphs = [
        " ".join(sentences[start : start + _SENTENCES_A_PARAGRAPH]) for start in range(0, count, _SENTENCES_A_PARAGRAPH)
    ]
    return WrittenDocument("\n\n".join(paragraphs), tuple(facts))


def _plant_facts(rng: PortableRandom) -> tuple[tuple[str, str, str], ...]:
    code, depth, person = str(1000 + rng.draw_below(9000)), str(100 + rng.draw_below(900)), _pick_name(rng)
    place, dock, office = (rng.choose(_WRITER["place"]) for _ in range(3))
    return (
        (
            f"What is the access code of the granary at {place}?",
            f"The access code of the granary at {place} was changed to {code} and is known to two people only.",
            code,
        ),
        (
            f"How deep is the basin at {dock}, in centimetres?",
            f"After the dredging the basin at {dock} is {depth} centimetres deep at low water.",
            depth,
        ),
        (
            f"Who was elected warden at {office}?",
            f"The warden elected at {office} for the coming year is {person}, by a show of hands.",
            person,
        ),
    )


def _write_sentence(rng: PortableRandom) -> str:
    text = _SLOT.sub(lambda found: _fill(found.group(1), rng), rng.choose(_WRITER["frames"]))
    return text[0].upper() + text[1:]


def _fill(slot: str, rng: PortableRandom) -> str:
    if slot == "n":
        return f"{12 + rng.draw_below(9_988):,}"
    return _pick_name(rng) if slot == "name" else rng.choose(_WRITER[slot])


def _pick_name(rng: PortableRandom) -> str:
    return f"{rng.choose(_WRITER['first'])} {rng.choose(_WRITER['last'])}"


# -- profiles --------------------------------------------------------------------------------------------------------
# Loads documents: the fixture, the synthetic writer, LongBench v1 and v2.
#
# LongBench is looked for in ``--longbench-dir``, then in the local Hugging Face cache, then on the hub. Its licence is
# its authors': what is built from it stays with whoever builds it.

PROFILES = ("fixture", "synthetic-v1", "longbench-v1", "longbench-v2")
OWN_LOGS = "jsonl"
"""The profile of one's own logs; `sembench.manifests.traffic` reads them."""
LONGBENCH_V1 = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
    "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
LONGBENCH_V2 = ("longbench-v2",)
HUB_REPOS = {"longbench-v1": ("THUDM/LongBench", "zai-org/LongBench"), "longbench-v2": ("THUDM/LongBench-v2",)}
HUB_FILES = {"longbench-v1": "data.zip", "longbench-v2": "data.json"}
_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
_WRITTEN_HELD_OUT = 5
_SYNTHETIC_WORDS = (500, 900, 1600)

# The question for datasets that have none of their own.
_TASKS = {
    "gov_report": "Summarise the report in one page.",
    "multi_news": "Write one summary of all the articles.",
    "qmsum": "What was decided in the meeting?",
    "lcc": "Write the next line of this code.",
    "repobench-p": "Write the next line of this code.",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A question and the answers that count as right; no answers where they are not known."""

    question: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """A document and the questions about it. ``held_out`` documents never become donors."""

    dataset: str
    source_id: str
    context: str
    tasks: tuple[Task, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class SourceSelection:
    """Which documents to load. ``max_items`` limits the documents of each dataset that become donors."""

    profile: str = "fixture"
    datasets: tuple[str, ...] = ()
    max_items: int | None = None
    longbench_dir: str = ""
    hf_revision: str | None = None
    hold_out: bool = True


def load_sources(choice: SourceSelection) -> Iterator[list[Source]]:
    """Yield the documents of one dataset at a time: first those that become donors, then the held-out ones."""
    if choice.max_items is not None and choice.max_items < 1:
        raise InputError(f"--max-items-per-dataset is {choice.max_items}", hint="ask for one document or more")
    if choice.profile == "fixture":
        yield _limit_donors(_load_fixture(), choice)
    elif choice.profile == "synthetic-v1":
        yield _write_synthetic(30 if choice.max_items is None else choice.max_items, choice.hold_out)
    elif choice.profile in HUB_REPOS:
        known = LONGBENCH_V1 if choice.profile == "longbench-v1" else LONGBENCH_V2
        for name in choice.datasets or known:
            if choice.datasets or not choice.longbench_dir or _find_file(Path(choice.longbench_dir), name):
                yield _split_held_out(_read_rows(name, choice), choice)
    else:
        raise InputError(f"no profile {choice.profile!r}", hint="one of " + ", ".join(PROFILES))


# -- ours ----------------------------------------------------------------------------------------------------------


def _load_fixture() -> Iterator[Source]:
    for text in read_texts("fixture_texts")["text"]:
        tasks = tuple(Task(fact["question"], (fact["answer"],)) for fact in text["facts"])
        held_out, facts = text.get("held_out", False), {"domain": text["domain"]}
        yield Source("fixture", text["name"], "\n\n".join(text["paragraphs"]), tasks, facts, held_out)
    for number in range(_WRITTEN_HELD_OUT):  # more negative controls than we could write by hand
        yield _write_source("fixture", f"written-{number}", 400, held_out=True)


def _limit_donors(sources: Iterable[Source], choice: SourceSelection) -> list[Source]:
    kept = list(sources)
    donors = [source for source in kept if not source.held_out][: choice.max_items]
    return donors + [source for source in kept if source.held_out]


def _write_synthetic(count: int, hold_out: bool) -> list[Source]:
    spare = max(2, count // 2) if hold_out else 0
    lengths = (_SYNTHETIC_WORDS[number % len(_SYNTHETIC_WORDS)] for number in range(count + spare))
    return [
        _write_source("synthetic-v1", f"synthetic-{number:04d}", words, held_out=number >= count)
        for number, words in enumerate(lengths)
    ]


def _write_source(dataset: str, name: str, words: int, *, held_out: bool) -> Source:
    made = write_document(f"{dataset}:{name}", words)
    tasks = tuple(Task(question, (answer,)) for question, answer in made.facts)
    return Source(dataset, name, made.context, tasks, {"length": words}, held_out)


# -- LongBench -----------------------------------------------------------------------------------------------------


def _split_held_out(rows: Iterable[tuple[int, dict[str, Any]]], choice: SourceSelection) -> list[Source]:
    """Return the documents of the rows. The first become donors; as many of the next, or a fifth, are held out."""
    limit = None if choice.max_items is None else choice.max_items * (2 if choice.hold_out else 1)
    found: list[Source] = []
    for number, row in rows:
        if limit is not None and len(found) >= limit:
            break
        source = _parse_source(number, row, choice.profile)
        if source is not None:
            found.append(source)
    if not choice.hold_out:
        return found
    spare = min(len(found) - 1, max(1, len(found) // 5))
    keep = len(found) - spare if choice.max_items is None else min(choice.max_items, len(found) - spare)
    return [replace(source, held_out=at >= keep) for at, source in enumerate(found)]


def _parse_source(number: int, row: Mapping[str, Any], profile: str) -> Source | None:
    context = row.get("context")
    if not isinstance(context, str) or not context.strip():
        return None
    if profile == "longbench-v2":
        return _parse_multiple_choice(number, row, context)
    dataset = str(row.get("dataset") or profile)
    question = str(row.get("input") or "").strip() or _TASKS.get(dataset, "What is the main point of the material?")
    answers = tuple(str(answer) for answer in row.get("answers") or () if str(answer).strip())
    metadata = {"length": row.get("length"), "language": row.get("language"), "source_index": number}
    return Source(dataset, str(row.get("_id") or number), context, (Task(question, answers),), metadata)


def _parse_multiple_choice(number: int, row: Mapping[str, Any], context: str) -> Source:
    letters = {letter: str(row.get(f"choice_{letter}", "")) for letter in "ABCD"}
    options = "\n".join(f"{letter}. {text}" for letter, text in letters.items())
    answer = str(row.get("answer", "")).strip()
    task = Task(f"{row.get('question', '')}\n{options}\nAnswer with one letter.", (answer,) if answer else ())
    metadata = {
        "domain": row.get("domain"),
        "length": row.get("length"),
        "source_index": number,
        "multiple_choice": True,
    }
    return Source("longbench-v2", str(row.get("_id") or number), context, (task,), metadata)


def _read_rows(name: str, choice: SourceSelection) -> Iterator[tuple[int, dict[str, Any]]]:
    if choice.longbench_dir:
        folder = Path(choice.longbench_dir)
        if not folder.is_dir():
            raise InputError(
                f"{folder} is not a folder", hint="pass --longbench-dir with the folder of the .jsonl files"
            )
        path = _find_file(folder, name)
        if path is None:
            tried = ", ".join(f"{name}{ending}" for ending in _ENDINGS)
            raise InputError(f"{folder} holds no dataset {name}", hint=f"looked for {tried}")
        with open_text(path) as stream:
            yield from _parse_rows(stream, str(path))
        return
    path = _fetch_archive(choice)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            inside = next((item for item in archive.namelist() if item.endswith(f"/{name}.jsonl")), None)
            if inside is None:
                raise InputError(f"LongBench has no dataset {name}", hint="one of " + ", ".join(LONGBENCH_V1))
            with archive.open(inside) as raw:
                yield from _parse_rows(io.TextIOWrapper(raw, encoding="utf-8"), inside)
    else:
        with open_text(path) as stream:
            yield from _parse_rows(stream, str(path))


def _find_file(folder: Path, name: str) -> Path | None:
    names = (name, "data") if name in LONGBENCH_V2 else (name,)
    places = (folder / f"{stem}{ending}" for stem in names for ending in _ENDINGS)
    return next((path for path in places if path.is_file()), None)


def _parse_rows(stream: Iterable[str], where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the numbered rows of a JSON Lines file, or of one JSON list."""
    if where.removesuffix(".gz").endswith(".json"):
        lines: Iterable[Any] = _parse_json("".join(stream), where, 1)
        if not isinstance(lines, list):
            raise InputError(f"{where} holds no list", hint="expected one JSON list of records")
    else:
        lines = (_parse_json(line, where, number) for number, line in enumerate(stream, start=1) if line.strip())
    for number, row in enumerate(lines):
        if not isinstance(row, dict):
            raise InputError(f"{where} record {number} is no object", hint="expected LongBench records")
        yield number, row


def _parse_json(text: str, where: str, number: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} line {number} is not JSON: {error.msg}", hint="fetch the file again") from None


def _fetch_archive(choice: SourceSelection) -> Path:
    """Return the path of the archive: from the local cache, which needs no network, else from the hub."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError(
            "LongBench from the hub needs the package huggingface_hub",
            hint="pip install 'semblend-suite[longbench]', or pass --longbench-dir",
        ) from None
    why = ""
    for offline in (True, False):
        for repo in HUB_REPOS[choice.profile]:
            try:
                return Path(
                    hf_hub_download(
                        repo, HUB_FILES[choice.profile], repo_type="dataset", revision=choice.hf_revision,
                        local_files_only=offline,
                    )
                )  # fmt: skip
            except (OSError, ValueError) as error:  # not cached, no network, no such file
                why = str(error).partition("\n")[0]
            except Exception as error:  # the http client's own errors share no base with anything above
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
    raise InputError(
        f"LongBench is neither in the Hugging Face cache nor can it be fetched: {why}",
        hint="pass --longbench-dir with a folder that holds qasper.jsonl, hotpotqa.jsonl, ...",
    )
