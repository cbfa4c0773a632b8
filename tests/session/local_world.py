"""Sessions over the shortest engine there is, for tests: its pool, its requests, and what it has told."""

from __future__ import annotations

import torch
from naive_engine import NaiveEngine

from semblend.config import SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import Rows
from semblend.prompt import Namespace, Prompt
from semblend.session.local import LocalSessions, SlotPool
from semblend.session.session import SessionRequest
from semblend.session.settings import LocalSettings

DOCUMENT = [(7 * n) % 31 + 1 for n in range(90)]
TARGET = [5, 9, 2, 6, 5, 3, *DOCUMENT, 8, 9, 7]


class Slots:
    """A pool that knows what is free."""

    def __init__(self, count: int, page: int = 1) -> None:
        self.free, self.page = list(range(page, count)), page

    def take(self, count: int):
        assert count % self.page == 0
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return torch.tensor(taken)

    def give_back(self, slots) -> None:
        assert not set(slots.tolist()) & set(self.free), "freed twice"
        self.free = sorted([*slots.tolist(), *self.free])


class LocalWorld:
    """Sessions, their engine and their pool; a request is computed cold by `compute`."""

    def __init__(self, page: int = 1, slots: int = 512, **settings) -> None:
        self.engine, self.slots = NaiveEngine.make(slots=slots), Slots(slots, page)
        self.sink = MemorySink()
        config = SemBlendConfig(quality="fast", metrics=False)
        self.sessions = LocalSessions(
            self.engine,
            SemBlend(config, sinks=[self.sink]),
            SlotPool(self.slots.take, self.slots.give_back, page),
            LocalSettings(config=config, **settings),
            QualitySettings(mode="fast", first_seam_tokens=4, seam_tokens=4, piece_ms=1e-9, prefills=False),
            engine="naive",
            engine_version="0",
        )

    def request(self, name: str, tokens: list[int], **more) -> SessionRequest:
        prompt = Prompt(tokens, namespace=Namespace(salt=more.pop("salt", "")))
        return SessionRequest(name, prompt, len(tokens) - 1, **more)

    def compute(self, request: SessionRequest):
        """What SGLang does with a request that we do not serve; its row."""
        self.sessions.offer(request, 0)
        tokens = request.prompt.token_ids.tolist()
        row = self.slots.take(-(-len(tokens) // self.slots.page) * self.slots.page)
        self.engine.forward(Rows.of(tokens, list(range(len(tokens))), row))
        self.sessions.note_prompt(request.request_id, row[: len(tokens)])
        self.sessions.forget(request.request_id)
        return row

    def donate(self, **more) -> None:
        self.slots.give_back(self.compute(self.request("donor", [3, 1, 4, *DOCUMENT, 9, 9], **more)))

    def donate_as(self, tenant: str, tokens: list[int]) -> tuple[str | None, int]:
        """A donor of a tenant; its name, and the bytes of all donors in host memory."""
        slots, prompt = self.slots.take(len(tokens)), Prompt(tokens, namespace=Namespace(tenant=tenant))
        name = self.sessions.donors.keep(prompt, slots)
        self.slots.give_back(slots)
        return name, self.sessions.donors.kv.used_bytes["host"]

    def begin(self, request: SessionRequest) -> int:
        """Offer and begin; the tokens that are offered."""
        offered = self.sessions.offer(request, 0)
        if offered:
            self.sessions.load(request.request_id, lambda: torch.zeros(0, dtype=torch.int64))
        return offered

    def receipts(self):
        return [event.fields["receipt"] for event in self.sink.events if event.fields.get("receipt") is not None]
