"""Rewords text by rule: a table of near-synonyms, and adverbials moved to the end of the sentence.

No model is used, so the result is the same everywhere. The meaning stays, and most runs of equal tokens are broken.
"""

from __future__ import annotations

import re

_SYNONYMS = {
    "about": "roughly", "above": "over", "according to": "following", "after": "following", "allow": "permit",
    "allowed": "permitted", "almost": "nearly", "also": "likewise", "although": "even though", "answer": "reply",
    "because": "since", "before": "ahead of", "began": "started", "begin": "start", "begins": "starts",
    "below": "under", "beside": "next to", "between": "among", "big": "large", "bought": "purchased",
    "bring": "fetch", "brought": "fetched", "but": "yet", "chiefly": "mainly", "collected": "gathered",
    "cost": "expense", "costs": "expenses", "decides": "determines", "during": "throughout", "each": "every",
    "end": "close", "ends": "closes", "enough": "sufficiently", "every": "each", "fast": "quick", "fell": "dropped",
    "few": "hardly any", "finished": "completed", "first": "earliest", "found": "discovered", "from": "out of",
    "gave": "handed", "get": "obtain", "give": "hand", "gives": "hands", "good": "fine", "has": "possesses",
    "have": "possess", "held": "kept", "help": "assist", "holds": "contains", "however": "still", "if": "in case",
    "important": "significant", "in": "within", "is": "remains", "keeps": "retains", "kept": "retained",
    "known": "familiar", "large": "big", "last": "final", "later": "afterwards", "least": "smallest", "less": "fewer",
    "long": "lengthy", "made": "produced", "make": "produce", "many": "numerous", "may": "can", "more": "further",
    "most": "the majority of", "moved": "shifted", "much": "a great deal of", "must": "has to", "near": "close to",
    "new": "fresh", "no": "not any", "nobody": "no one", "not": "in no way", "often": "frequently", "old": "former",
    "on": "upon", "only": "merely", "or": "or else", "other": "further", "own": "possess", "paid": "settled",
    "part": "portion", "pays": "settles", "people": "persons", "place": "spot", "reached": "arrived at",
    "read": "studied", "said": "stated", "says": "states", "shows": "displays", "since": "as", "small": "little",
    "some": "several", "soon": "before long", "still": "even now", "such": "of that kind", "take": "grab",
    "taken": "removed", "takes": "requires", "than": "compared with", "that": "which", "then": "afterwards",
    "therefore": "hence", "they": "these", "this": "the present", "through": "by way of", "to": "towards",
    "told": "informed", "two": "a pair of", "under": "beneath", "until": "up to when", "used": "employed",
    "very": "highly", "was": "had been", "went": "travelled", "were": "had been", "when": "whenever",
    "where": "in which", "which": "that", "while": "whereas", "who": "that", "will": "is going to",
    "with": "along with", "without": "lacking", "work": "labour", "would": "might", "wrote": "noted",
    "year": "twelvemonth", "years": "twelvemonths",
}  # fmt: skip
_WORD = re.compile(r"\b[a-z]+(?: to)?\b")
_LEADING_ADVERBIAL = re.compile(
    r"(^|(?<=[.!?] ))([A-Z][a-z]+ [^,.;:!?]{3,40}), ([a-z])((?:[^.!?]|\.(?=\d))*)([.!?])(?=\s|$)"
)


def reword(text: str) -> str:
    """Return the text with common words replaced and leading adverbials moved to the end.

    >>> reword("In the spring, the mirror was moved because it had aged.")
    'The mirror had been shifted since it had aged, within the spring.'
    """
    moved = _LEADING_ADVERBIAL.sub(_move_behind, text)
    return _WORD.sub(_replace_word, moved)


def _move_behind(found: re.Match[str]) -> str:
    before, adverbial, first, rest, stop = found.groups()
    return f"{before}{first.upper()}{rest}, {adverbial[0].lower()}{adverbial[1:]}{stop}"


def _replace_word(found: re.Match[str]) -> str:
    word = found.group()
    if word in _SYNONYMS:
        return _SYNONYMS[word]
    if word.endswith(" to"):
        return f"{_SYNONYMS.get(word[:-3], word[:-3])} {_SYNONYMS['to']}"
    return word
