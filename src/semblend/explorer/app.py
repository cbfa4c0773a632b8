"""What the explorer answers, without any HTTP: one method a route, plain data in and out."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import count
from typing import Any

import numpy as np

from semblend._version import __version__
from semblend.config import SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.discover.donor import Donor
from semblend.errors import InputError
from semblend.facade import SemBlend
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.text.tokenization import Tokenizer

PREVIEW_CHARACTERS = 240
MOST_PREVIEWS = 10_000
EVENTS_SHOWN = 200
MOST_DONORS_COMPARED = 2000
PREFIX_BLOCK_TOKENS = 16
MOST_DONOR_ID_CHARACTERS = 200


class NotFoundError(InputError):
    """The thing that a request names does not exist."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checked fields of a request that carries text."""

    text: str
    tenant: str
    donor_id: str = ""

    @property
    def namespace(self) -> Namespace:
        return Namespace(tenant=self.tenant)


class ExplorerApp:
    """The explorer's answers over one `SemBlend` and one tokenizer."""

    def __init__(self, config: SemBlendConfig, tokenizer: Tokenizer) -> None:
        self._recent = MemorySink(EVENTS_SHOWN)
        self.semblend = SemBlend(config, sinks=[self._recent])
        self.tokenizer = tokenizer
        self._previews: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._numbers = count(1)

    def health(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "version": __version__,
            "tokenizer": self.tokenizer.name,
            "store": self.semblend.config.store or None,
            "donors": self.semblend.stats().donors,
        }

    def examples(self) -> dict[str, Any]:
        """Donors to register, a prompt to ask with, and what to look for."""
        return {"examples": json.loads((resources.files(__package__) / "examples.json").read_text(encoding="utf-8"))}

    def add_donor(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = _read(body)
        prompt = self._prompt(asked)
        donor_id = asked.donor_id or self._free_id()
        started = time.perf_counter()
        donor = self.semblend.register(prompt, donor_id=donor_id)
        elapsed_ms = _ms_since(started)
        with self._lock:
            self._previews[donor_id] = asked.text[:PREVIEW_CHARACTERS]
            self._previews.move_to_end(donor_id)
            while len(self._previews) > MOST_PREVIEWS:
                self._previews.popitem(last=False)
        return {"donor": self._donor_row(donor), "register_ms": elapsed_ms}

    def donors(self) -> dict[str, Any]:
        return {"donors": [self._donor_row(donor) for donor in self.semblend.donors()]}

    def forget_donor(self, donor_id: str) -> dict[str, Any]:
        if not self.semblend.forget(donor_id):
            raise NotFoundError(f"no donor {donor_id!r}", hint="GET /api/donors lists them")
        with self._lock:
            self._previews.pop(donor_id, None)
        return {"forgotten": donor_id}

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        """Why, and for every token of the prompt the donor that holds it, or null."""
        asked = _read(body)
        started = time.perf_counter()
        prompt = self._prompt(asked)
        tokenize_ms = _ms_since(started)
        started = time.perf_counter()
        self.semblend.lookup(prompt)  # what an engine would wait for: timed by itself, and it leaves its events
        lookup_ms = _ms_since(started)
        explanation = self.semblend.explain(prompt)
        spans = explanation.decision.spans if isinstance(explanation.decision, ReusePlan) else ()
        donor_ids = list(dict.fromkeys(span.donor_id for span in spans))
        owners: list[int | None] = [None] * len(prompt)
        for span in spans:
            number = donor_ids.index(span.donor_id)
            owners[span.target_start : span.target_end] = [number] * span.length
        return {
            "explanation": explanation.to_dict(),
            "text": str(explanation),
            "pieces": self.tokenizer.pieces(asked.text),
            "donor_ids": donor_ids,
            "owners": owners,
            "prefix_tokens": self._prefix_tokens(prompt),
            "timing": {"tokenize_ms": tokenize_ms, "lookup_ms": lookup_ms},
        }

    def stats(self) -> dict[str, Any]:
        return asdict(self.semblend.stats())

    def events(self) -> dict[str, Any]:
        """The newest events, oldest first."""
        return {"events": [event.to_dict() for event in self._recent.events]}

    def close(self) -> None:
        self.semblend.close()

    def _prompt(self, asked: _Asked) -> Prompt:
        return Prompt(self.tokenizer.encode(asked.text), text=asked.text, namespace=asked.namespace)

    def _prefix_tokens(self, prompt: Prompt) -> int | None:
        """What an exact-prefix cache would hold, in whole blocks; None when there are too many donors to compare."""
        donors = [donor for donor in self.semblend.donors() if donor.namespace == prompt.namespace]
        if len(donors) > MOST_DONORS_COMPARED:
            return None
        longest = 0
        for donor in donors:
            tokens = self.semblend.donor_tokens(donor.donor_id)
            if tokens is not None:
                longest = max(longest, _common_prefix(prompt.token_ids, tokens))
        return min(longest, len(prompt) - 1) // PREFIX_BLOCK_TOKENS * PREFIX_BLOCK_TOKENS

    def _free_id(self) -> str:
        taken = {donor.donor_id for donor in self.semblend.donors()}
        return next(name for name in (f"doc-{number}" for number in self._numbers) if name not in taken)

    def _donor_row(self, donor: Donor) -> dict[str, Any]:
        return {
            "donor_id": donor.donor_id,
            "tenant": donor.namespace.tenant,
            "token_count": donor.token_count,
            "generation": donor.generation,
            "created_unix_s": donor.created_unix_s,
            "expires_unix_s": donor.expires_unix_s,
            "pinned": donor.pinned,
            "preview": self._previews.get(donor.donor_id),
        }


def _read(body: dict[str, Any]) -> _Asked:
    for name in body:
        if name not in ("text", "tenant", "donor_id"):
            raise InputError(f"unknown field {name!r}", hint="the fields are text, tenant and donor_id")
    values = {}
    for name in ("text", "tenant", "donor_id"):
        value = body.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{name} is not a string", hint='send JSON such as {"text": "..."}')
        values[name] = value or ""
    if not values["text"]:
        raise InputError("text is missing or empty", hint='send JSON such as {"text": "..."}')
    if len(values["donor_id"]) > MOST_DONOR_ID_CHARACTERS:
        raise InputError("donor_id is too long", hint=f"use at most {MOST_DONOR_ID_CHARACTERS} characters")
    return _Asked(**values)


def _common_prefix(one: TokenArray, other: TokenArray) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)
