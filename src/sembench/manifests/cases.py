"""The cases of a manifest: how they are written and read, a fair subset of them, and frozen sets of manifests."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sembench.files import hash_file, open_output, open_text, read_fields, read_json_object, read_text
from semblend.errors import InputError

# -- cases -----------------------------------------------------------------------------------------------------------
# A manifest is JSON Lines, one case a line, keys sorted (``sembench.manifest.v1``). Only one case is in memory at a
# time. Two metadata keys make wrong KV visible in an answer: ``planted_fact`` is what only the recipient's own text
# says, ``donor_fact`` is what the donor's text says in its place.

BENCHMARK_VERSION = "sembench.2026.11"

BASE_PROMPT = "base_prompt"
LEADING_EVIDENCE_DONOR = "leading_evidence_donor"
SEGMENT_DONOR = "segment_donor"
UNRELATED_BASE_PROMPT = "unrelated_base_prompt"
DECOY_DONOR = "decoy_donor"

_FIELDS_HINT = "docs/METRICS.md, section Manifest, lists the fields"

BadLine = Callable[[InputError], None]


@dataclass(frozen=True, slots=True)
class DonorPrompt:
    """An earlier prompt whose KV the backend may still hold."""

    donor_id: str
    text: str
    label: str = BASE_PROMPT
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a manifest.

    ``source_id`` names the document that the recipient is about: intervals are clustered by it, since cases cut from
    one document are not independent. A ``negative_control`` shares nothing with any donor and must stay cold.
    """

    item_id: str
    dataset: str
    source_id: str
    transform: str
    donor_prompts: tuple[DonorPrompt, ...]
    recipient_prompt: str
    input: str = ""
    answers: tuple[str, ...] = ()
    negative_control: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    benchmark_version: str = BENCHMARK_VERSION

    def describe(self) -> dict[str, Any]:
        """Return what the records of this case say about it."""
        names = ("item_id", "dataset", "transform", "negative_control", "source_id")
        return {name: getattr(self, name) for name in names}

    @property
    def planted_fact(self) -> str | None:
        """What only the recipient's own text says."""
        return read_text(self.metadata.get("planted_fact"))

    @property
    def donor_fact(self) -> str | None:
        """What the donor's text says in its place. An answer that contains it used wrong KV."""
        return read_text(self.metadata.get("donor_fact"))


_CASE_FIELDS = tuple(field.name for field in fields(Case))


def make_item_id(*parts: object) -> str:
    """Return 16 hex digits that stand for the parts, in order.

    >>> make_item_id("qasper", 3, "rag_reorder")
    '0f22359642de9722'
    """
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode("utf-8")).hexdigest()[:16]


# -- writing -------------------------------------------------------------------------------------------------------


def format_case(case: Case) -> str:
    """Return the case as a line of a manifest, without the line feed."""
    return json.dumps(asdict(case), sort_keys=True, ensure_ascii=False)


def write_manifest(path: str | Path, cases: Iterable[Case]) -> int:
    """Write the cases and return how many; the file appears whole or not at all."""
    count = 0
    with open_output(path) as stream:
        for case in cases:
            stream.write(format_case(case) + "\n")
            count += 1
    return count


# -- reading -------------------------------------------------------------------------------------------------------


def read_manifest(path: str | Path, *, on_bad: BadLine | None = None) -> Iterator[Case]:
    """Yield the cases of a manifest, one at a time. The error about a bad line names file, line and field.

    With ``on_bad`` such a line is handed to it and left out (``--skip-bad``); without, it raises.
    """
    seen: set[str] = set()
    with open_text(path) as stream:
        for number, line in _number_lines(stream, path):
            if not line.strip():
                continue
            try:
                case = parse_case(_parse_line(line, path, number), where=f"{path} line {number}")
                if case.item_id in seen:
                    words = f"{path} line {number}: field item_id {case.item_id!r} was already used above"
                    raise InputError(words, hint=_FIELDS_HINT)
            except InputError as error:
                if on_bad is None:
                    raise
                on_bad(error)
                continue
            seen.add(case.item_id)
            yield case


def parse_case(value: Any, *, where: str = "case") -> Case:
    """Return a case from parsed JSON; ``where`` is the place that an error message names."""
    filled = ("item_id", "source_id", "transform", "recipient_prompt")
    found = read_fields(Case, value, where, _FIELDS_HINT, required=_CASE_FIELDS, filled=filled)
    places = ((f"{where}, donor_prompts[{at}]", donor) for at, donor in enumerate(found["donor_prompts"]))
    donors = (read_fields(DonorPrompt, one, place, _FIELDS_HINT, filled=("donor_id", "text")) for place, one in places)
    return Case(**{**found, "donor_prompts": tuple(DonorPrompt(**donor) for donor in donors)})


def _number_lines(stream: Iterable[str], path: str | Path) -> Iterator[tuple[int, str]]:
    lines, number = iter(stream), 0
    while True:
        number += 1
        try:
            line = next(lines)
        except StopIteration:
            return
        except UnicodeDecodeError:
            raise InputError(f"{path} line {number} or below is not UTF-8", hint="write the file again") from None
        except (EOFError, zlib.error, OSError) as error:  # a packed file that was cut off
            raise InputError(
                f"{path} ends early after line {number - 1}: {error}", hint="fetch or build it again"
            ) from None
        yield number, line


def _parse_line(line: str, path: str | Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "too deeply nested"
        hint = "the file is cut off: build it again" if not line.endswith("\n") else "one JSON object a line"
        raise InputError(f"{path} line {number} is not JSON: {why}", hint=hint) from None


# -- a fair subset ---------------------------------------------------------------------------------------------------
# A fair subset of a manifest: every transform gets its turn, negative controls too.
#
# The first lines of a manifest may hold no negative control. A run over them could never fail the most important gate.

NEGATIVE = "negative_control"


def take_turns(transforms: Iterable[str], most: int) -> list[int]:
    """Return the positions of at most ``most`` items, one of each transform in turn, in ascending order.

    Each transform starts at another of its items, so that a short run is not about one document only. Negative
    controls come second, so that a run of two cases has one.

    >>> take_turns(["a", "b", "a", "b", "c"], 3), take_turns(["a", "a", "a", "b"], 3)
    ([0, 3, 4], [0, 1, 3])
    >>> take_turns(["a", "b", "negative_control"], 2)
    [0, 2]
    """
    found: dict[str, list[int]] = {}
    for at, transform in enumerate(transforms):
        found.setdefault(transform, []).append(at)
    order = sorted(found, key=lambda name: 0.5 if name == NEGATIVE else list(found).index(name))
    places = {name: found[name] for name in order}
    chosen: list[int] = []
    for depth in range(max((len(group) for group in places.values()), default=0)):
        for number, group in enumerate(places.values()):
            if depth < len(group):
                chosen.append(group[(depth + number) % len(group)])
        if len(chosen) >= most:
            break
    return sorted(chosen[:most])


def choose_cases(manifest: str, most: int | None, on_bad: BadLine | None = None) -> Iterator[Case]:
    """Yield all cases, or ``most`` of them. The manifest is read twice, so that it need not fit in memory."""
    if most is None:
        yield from read_manifest(manifest, on_bad=on_bad)
        return
    wanted = set(take_turns((case.transform for case in read_manifest(manifest, on_bad=on_bad)), most))
    yield from (case for at, case in enumerate(read_manifest(manifest, on_bad=on_bad)) if at in wanted)


def check_versions(manifest: str, versions: Iterable[str]) -> None:
    """Refuse a manifest without cases, or with cases of different benchmark versions."""
    found = sorted(set(versions))
    if not found:
        raise InputError(f"{manifest} holds no cases", hint="build it again")
    if len(found) > 1:
        raise InputError(
            f"{manifest} mixes the benchmark versions {', '.join(found)}", hint="rebuild it, or pass --skip-verify"
        )


def count_cases(manifest: str, most: int | None, *, one_version: bool) -> int:
    """Count the cases of a run. Every line is read, so that a bad one is reported before the measuring starts."""
    versions: set[str] = set()
    total = 0
    for case in read_manifest(manifest):
        total += 1
        versions.add(case.benchmark_version)
    check_versions(manifest, versions if one_version else list(versions)[:1])
    return total if most is None else min(total, most)


# -- frozen manifests ------------------------------------------------------------------------------------------------
# A frozen set of manifests: a small file with their checksums and counts.
#
# Manifests stay out of version control (their texts belong to others); the frozen file goes in, and anybody who builds
# the manifests again can see whether they are the same work.

FROZEN_VERSION = "sembench.frozen.v1"
ENDINGS = (".jsonl", ".jsonl.gz")


def describe_manifest(path: Path) -> dict[str, Any]:
    """Return the checksum and the counts of one manifest. A bad line raises an error."""
    transforms: Counter[str] = Counter()
    versions: set[str] = set()
    negatives = 0
    for case in read_manifest(path):
        transforms[case.transform] += 1
        versions.add(case.benchmark_version)
        negatives += case.negative_control
    return {
        "sha256": hash_file(path),
        "items": transforms.total(),
        "negative_controls": negatives,
        "benchmark_versions": sorted(versions),
        "by_transform": dict(sorted(transforms.items())),
    }


def list_manifests(folder: str) -> list[Path]:
    """Return the manifests of a folder, sorted by name."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder", hint="pass the folder that sembench build wrote to")
    return sorted(path for path in Path(folder).iterdir() if path.name.endswith(ENDINGS))


def read_frozen(path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the description of every frozen manifest by name."""
    value = read_json_object(path, hint="freeze the manifests again")
    if value.get("frozen_version") != FROZEN_VERSION:
        raise InputError(f"{path} is no {FROZEN_VERSION}", hint="make one with sembench freeze")
    manifests = value.get("manifests")
    if not isinstance(manifests, dict) or not all(isinstance(own, dict) for own in manifests.values()):
        raise InputError(f"{path}: manifests is not an object of objects", hint="freeze the manifests again")
    return manifests


def find_differences(frozen: Mapping[str, Mapping[str, Any]], folder: str) -> list[str]:
    """Return one line for each manifest that is missing or has changed."""
    lines = []
    for name, was in frozen.items():
        path = Path(folder) / name
        if not path.is_file():
            lines.append(f"{name} is missing")
            continue
        checksum = hash_file(path)
        if checksum != was.get("sha256"):
            lines.append(f"{name} has the SHA-256 {checksum[:12]}…, frozen was {str(was.get('sha256'))[:12]}…")
    return lines
