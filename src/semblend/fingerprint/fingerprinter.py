"""Prompt → Fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.fingerprint.hashes import DEFAULT_SCHEME, HashArray, HashScheme, PositionArray
from semblend.prompt import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprint:
    """The seeds of a prompt: their positions and their hashes."""

    positions: PositionArray
    hashes: HashArray

    def __len__(self) -> int:
        return len(self.positions)


class Fingerprinter:
    """Selects the seeds of prompts by one `HashScheme`."""

    def __init__(self, scheme: HashScheme = DEFAULT_SCHEME) -> None:
        from semblend.fingerprint import kernels

        self.scheme = scheme
        self._minimizers = kernels.select_minimizers

    def fingerprint(self, prompt: Prompt) -> Fingerprint:
        """Select the seeds of a prompt."""
        return Fingerprint(*self._minimizers(prompt.token_ids, self.scheme))
