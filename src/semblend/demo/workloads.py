"""What the demo asks, and the prompts to calibrate on: each with the prompts that were served before it."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from semblend.config import SemBlendConfig
from semblend.errors import InputError
from semblend.facade import SemBlend
from semblend.materialize.calibrate import CalibrationPrompt
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.span import Span
from semblend.text.logs import LoggedPrompt

if TYPE_CHECKING:
    from semblend.engine.model.tokenizer import ModelTokenizer

Chat = tuple[dict[str, str], ...]
SHORT_WORDS, LONG_WORDS = 700, 2900  # about 1,000 and 4,000 tokens
TEXTS: dict[str, Any] = tomllib.loads((resources.files(__package__) / "texts.toml").read_text(encoding="utf-8"))
"""Written for the demo."""


@dataclass(frozen=True, slots=True)
class Workload:
    """``prompt`` is measured after ``donors`` were served. ``fact`` is what a right answer says.

    ``stale_fact`` is what the donor said in its place: an answer with it would be KV of tokens that the prompt lacks.
    """

    key: str
    title: str
    about: str
    donors: tuple[Chat, ...]
    prompt: Chat
    fact: str = ""
    stale_fact: str = ""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """``questions`` of one conversation, one a turn; before it, ``donors`` were served to others."""

    title: str
    about: str
    donors: tuple[Chat, ...]
    system: str
    questions: tuple[str, ...]


READER = "You answer questions about documents. Give short answers and use only what the document says."
AUDITOR = "You check papers for the county archive. Be brief, and quote figures exactly as they stand."
CLERK = "You are a clerk in a reading room. Sort what you are given and mention what seems odd, in a friendly tone."

EDITS = (("4917", "2385"), ("twelve", "twenty"), ("mayor", "priest"))
"""What the prompt of the edited document says, and what its donor said instead."""


def workloads(*, long: bool = False) -> tuple[Workload, ...]:
    """The three prompts of the demo."""
    words = LONG_WORDS if long else SHORT_WORDS
    return (_same_document(words), _make_edited_document(words), _several_donors(words))


def dialogue(*, long: bool = False) -> Dialogue:
    """A conversation about one document; in its second turn a text is pasted that another conversation has read."""
    words = (LONG_WORDS if long else SHORT_WORDS) // 2
    plan = lengthen(TEXTS["expedition"], 31, words)
    pasted = lengthen(TEXTS["lighthouse"], 37, words)
    return Dialogue(
        "dialogue of three turns",
        "history comes from the exact prefix cache, the pasted text from a donor",
        (_ask(CLERK, pasted, "What does this handbook describe?"),),
        READER,
        (
            f"{plan}\nQuestion: Who is the guide?",
            f"Thank you. Here is another text.\n\n{pasted}\nQuestion: What is the name of the relief boat?",
            "When does the bus back to the valley leave?",
        ),
    )


def calibration(*, long: bool = False) -> Iterator[Workload]:
    """Many prompts of the kinds above, over other chronicles, with other questions."""
    words = LONG_WORDS if long else SHORT_WORDS
    for seed in range(100, 1000, 10):
        yield _same_document(words, seed, _LIGHTHOUSE_QUESTIONS[seed // 10 % len(_LIGHTHOUSE_QUESTIONS)])
        yield _make_edited_document(words, seed + 1, _LEASE_QUESTIONS[seed // 10 % len(_LEASE_QUESTIONS)])
        yield _several_donors(words, seed + 2, _NOTES_QUESTIONS[seed // 10 % len(_NOTES_QUESTIONS)])


_LIGHTHOUSE_QUESTIONS = (
    ("How often does the lamp flash?", "two white flashes"),
    ("What is the name of the relief boat?", "Marigold"),
    ("How high is the tower?", "thirty-four"),
    ("When are visitors welcome?", "May"),
)
_LEASE_QUESTIONS = (
    ("What is the access code of the granary?", "4917"),
    ("How long does the agreement run?", "twelve"),
    ("Who hears quarrels first?", "mayor"),
    ("How much is the rent?", "640"),
)
_NOTES_QUESTIONS = (
    ("Who is the beekeeper?", "Ilse Varga"),
    ("Who is the foreman of the glassworks?", "Ruben Asker"),
    ("How many players does the orchestra have?", "forty-one"),
)


def _ask(system: str, text: str, question: str) -> Chat:
    return (
        {"role": "system", "content": system},
        {"role": "user", "content": f"Read this.\n\n{text}\nQuestion: {question}"},
    )


def _same_document(words: int, seed: int = 11, asked: tuple[str, str] = _LIGHTHOUSE_QUESTIONS[1]) -> Workload:
    document = lengthen(TEXTS["lighthouse"], seed, words)
    return Workload(
        "same_document",
        "same document, other question",
        "another instruction ahead of it, so an exact prefix cache finds nothing",
        (_ask(CLERK, document, "What is this text about, in one sentence?"),),
        _ask(AUDITOR, document, asked[0]),
        asked[1],
    )


def _make_edited_document(words: int, seed: int = 17, asked: tuple[str, str] = _LEASE_QUESTIONS[0]) -> Workload:
    document = lengthen(TEXTS["lease"], seed, words)
    before = _apply_edits(document)
    return Workload(
        "edited_document",
        "edited document",
        "three words differ from the donor's, the one that is asked for among them",
        (_ask(CLERK, before, "Is anything odd about this paper?"),),
        _ask(AUDITOR, document, asked[0]),
        asked[1],
        dict(EDITS).get(asked[1], ""),
    )


def _several_donors(words: int, seed: int = 23, asked: tuple[str, str] = _NOTES_QUESTIONS[0]) -> Workload:
    notes = ("orchestra", "glassworks", "bees")
    passages = [lengthen(TEXTS[note], seed + 1000 * n, words // 3) for n, note in enumerate(notes, 1)]
    donors = tuple(
        _ask(CLERK, f"{write_chronicle(seed + 5000 * n, words // 6)}\n{passage}", "What comes first?")
        for n, passage in enumerate(passages, 1)
    )
    return Workload(
        "several_donors",
        "passages of several donors",
        "three passages, each from the middle of another prompt, in another order",
        donors,
        _ask(AUDITOR, "\n".join((passages[1], passages[2], passages[0])), asked[0]),
        asked[1],
    )


def _apply_edits(document: str) -> str:
    """What the donor said: other words of `EDITS`, each in one place."""
    for now, before in EDITS:
        head, found, tail = document.partition(now)
        if not found:
            raise InputError(f"the text has no {now!r} to edit", hint="keep EDITS in step with the text")
        document = head + before + tail
    return document


def write_chronicle(seed: int, words: int) -> str:
    """About ``words`` words of a daybook; the same for a seed, always, and for another seed another.

    >>> write_chronicle(1, 40) == write_chronicle(1, 40) != write_chronicle(2, 40)
    True
    """
    lines, count = ["From the daybook", ""], 0
    for entry in _write_entries(seed):
        lines.append(entry)
        count += len(entry.split())
        if count >= words:
            break
    return "\n".join(lines) + "\n"


def lengthen(text: str, seed: int, words: int) -> str:
    """``text`` and, where it has fewer than ``words`` words, a chronicle behind it."""
    lacking = words - len(text.split())
    return f"{text}\n{write_chronicle(seed, lacking)}" if lacking > 0 else text


def _write_entries(seed: int) -> Iterator[str]:
    rng = random.Random(seed)

    def draw(kind: str) -> str:
        found: str = rng.choice(TEXTS[kind])
        return found

    day = rng.randint(1, 40)
    while True:
        day += rng.randint(1, 3)
        what = rng.sample(TEXTS["what"], 2)
        who = rng.sample(TEXTS["who"], 2)
        yield (
            f"Day {day}. {draw('sky')} {who[0]} {draw('did')} {what[0]} {draw('where')}. "
            f"{draw('after').format(n=rng.randint(2, 60))} {who[1]} {draw('did')} {what[1]} {draw('where')}."
        )


# -- prompts to calibrate on -----------------------------------------------------------------------------------------

MIN_TOKENS = 32
_CONFIG = SemBlendConfig(embedder="none", metrics=False)


def prompts_of_workloads(workloads: Iterable[Workload], tokenizer: ModelTokenizer) -> Iterator[CalibrationPrompt]:
    """The demo's own prompts."""
    for workload in workloads:
        with SemBlend(_CONFIG) as library:
            for number, donor in enumerate(workload.donors):
                library.register(Prompt(tokenizer.encode_chat(donor)), donor_id=str(number))
            found = _prompt(library, Prompt(tokenizer.encode_chat(workload.prompt)))
        if found is not None:
            yield found


def prompts_of_log(
    log: Iterable[LoggedPrompt], encode: Callable[[str], Iterable[int]], *, max_tokens: int, vocab: int
) -> Iterator[CalibrationPrompt]:
    """Logged prompts in order, each with those before it; tenants stay apart, and too long ones are left out."""
    with SemBlend(_CONFIG) as library:
        for logged in log:
            ids = logged.token_ids if logged.token_ids is not None else list(encode(logged.text or ""))
            if not 0 < len(ids) <= max_tokens or int(max(ids)) >= vocab:
                continue
            prompt = Prompt(ids, namespace=Namespace(tenant=logged.tenant))
            found = _prompt(library, prompt)
            if found is not None:
                yield found
            library.register(prompt, donor_id=f"line-{logged.line}")


def _prompt(library: SemBlend, prompt: Prompt) -> CalibrationPrompt | None:
    """None where donors hold nothing but what an exact prefix cache would serve: that KV needs no gate."""
    plan = library.lookup(prompt)
    if not isinstance(plan, ReusePlan):
        return None
    spans = [span for span in plan.spans if span.target_start or span.donor_start]
    if sum(span.length for span in spans) < MIN_TOKENS:
        return None
    names = list(dict.fromkeys(span.donor_id for span in spans))
    tokens = {name: library.donor_tokens(name) for name in names}
    return CalibrationPrompt(
        _tuple(prompt.token_ids),
        tuple(_tuple(held) for held in tokens.values() if held is not None),
        tuple(_number_spans(span, names) for span in spans),
    )


def _number_spans(span: Span, names: list[str]) -> Span:
    return replace(span, donor_id=str(names.index(span.donor_id)), generation=0)


def _tuple(tokens: TokenArray) -> tuple[int, ...]:
    return tuple(int(token) for token in tokens)
