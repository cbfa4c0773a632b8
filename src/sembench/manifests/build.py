"""Builds a manifest: every document through every transform, then the negative controls.

A negative control must stay cold in a store that holds all donors of the manifest. So it is made of a document that was
held out. One that still shares a run of tokens with any donor (the same article in two collections) is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sembench.manifests.blocks import HashSet, hash_content, hash_every_offset
from sembench.manifests.cases import Case
from sembench.manifests.datasets import Source
from sembench.manifests.transforms import DECOYS, TRANSFORMS, TransformOptions
from semblend.errors import InputError
from semblend.text.tokenization import StableTokenizer

ALL_TRANSFORMS = (*TRANSFORMS, *DECOYS)
NEGATIVE = "negative_control"
_RUN_TOKENS = 16  # a shared run of 31 tokens or more contains a full block of 16 on the donor's grid


@dataclass
class ManifestBuilder:
    """Builds cases and counts what it left out and why."""

    transforms: Sequence[str] = ALL_TRANSFORMS
    options: TransformOptions = field(default_factory=TransformOptions)
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in self.transforms:
            if name not in TRANSFORMS and name not in DECOYS:
                raise InputError(f"no transform {name!r}", hint="one of " + ", ".join(ALL_TRANSFORMS))
        if self.options.max_segments < 1 or self.options.min_segment_chars < 1:
            raise InputError("--max-segments and --min-segment-chars start at 1", hint="use 4 and 400")

    def build_cases(self, datasets: Iterable[Sequence[Source]]) -> Iterator[Case]:
        """Yield all cases. The documents of one dataset are in memory at a time, held-out ones until the end."""
        donors = DonorRuns()
        waiting: list[tuple[Source, Source]] = []
        before: Source | None = None
        for sources in datasets:
            plain = [source for source in sources if not source.held_out]
            for at, source in enumerate(plain):
                neighbour = plain[(at + 1) % len(plain)] if len(plain) > 1 else before or source
                for case in self._build_from(source, neighbour):
                    donors.add(case)
                    yield case
            before = plain[-1] if plain else before
            if NEGATIVE in self.transforms and before is not None:
                spare = [source for source in sources if source.held_out]
                waiting += [(own, plain[at % len(plain)] if plain else before) for at, own in enumerate(spare)]
        yield from self._build_negatives(waiting, donors)

    def _build_from(self, source: Source, neighbour: Source) -> Iterator[Case]:
        for name in self.transforms:
            if name == NEGATIVE:
                continue
            make = TRANSFORMS.get(name) or DECOYS[name]
            case = make(source, neighbour, self.options)
            if case is None:
                self.left_out[f"{name}: the document does not lend itself to it"] += 1
            else:
                yield case

    def _build_negatives(self, waiting: Sequence[tuple[Source, Source]], donors: DonorRuns) -> Iterator[Case]:
        made = [TRANSFORMS[NEGATIVE](source, other, self.options) for source, other in waiting]
        cases = [case for case in made if case is not None]
        for case in cases:
            donors.add(case)
        for case in cases:
            if donors.count_shared(case.recipient_prompt):
                self.left_out[f"{NEGATIVE}: the held-out document shares text with a donor"] += 1
            else:
                yield case


class DonorRuns:
    """The hashed text of all donors. It tells whether a prompt shares 31 tokens or more with any of them.

    It uses plain hashing over the built-in tokenizer, so that it depends on no planner under test.
    """

    def __init__(self) -> None:
        self._tokenizer = StableTokenizer()
        self._runs = HashSet()
        self._seen: set[str] = set()

    def add(self, case: Case) -> None:
        for donor in case.donor_prompts:
            if donor.donor_id not in self._seen:
                self._seen.add(donor.donor_id)
                self.add_text(donor.text)

    def add_text(self, text: str) -> None:
        self._runs.add(hash_content(self._tokenizer.encode(text), _RUN_TOKENS))

    def count_shared(self, text: str) -> int:
        """Count the positions of the text where a donor's block is found; 0 means that no 31 tokens are shared."""
        return int(self._runs.contains(hash_every_offset(self._tokenizer.encode(text), _RUN_TOKENS)).sum())
