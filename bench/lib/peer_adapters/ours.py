"""This project's library, with its defaults and room for all donors."""

from __future__ import annotations

from typing import Any

from _protocol import Cases, RawSpan, serve

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig


class Ours:
    def __init__(self, cases: Cases) -> None:
        config = SemBlendConfig(embedder="none", max_donors=len(cases.donors) + 1, max_bytes=4 << 30)
        self.blend = SemBlend(config)
        self.blend.warm_up()

    def register(self, donor_id: str, ids: list[int]) -> None:
        self.blend.register(Prompt(ids), donor_id=donor_id)

    def lookup(self, ids: list[int]) -> Any:
        return self.blend.lookup(Prompt(ids))

    def spans(self, answer: Any) -> list[RawSpan]:
        if not isinstance(answer, ReusePlan):
            return []
        return [(span.donor_id, span.donor_start, span.target_start, span.length) for span in answer.spans]


if __name__ == "__main__":
    serve(Ours)
