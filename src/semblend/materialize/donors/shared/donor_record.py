"""The record of a published donor: what it holds, for whom it may be used, who wrote it.

A donor in the directory is one record and one KV file for each tensor-parallel rank, in no order: it counts once all of
them are there. Names say all that a listing needs to know:

    <writer>.lease                    locked while a process of the writer lives
    <writer>-<serial>.donor           the record
    <writer>-<serial>.<r>of<n>.kv     KV of rank r of n
    <writer>-<serial>.gone            a record that was withdrawn: its owner removes the donor
    *.part                            not whole yet

A writer's id is random and a serial is given once, so a key never names two donors.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from semblend.materialize.donors.shared.private_folder import PART
from semblend.prompt import Namespace, Prompt, TokenArray

MAGIC = b"SBDR0001"
LARGEST_RECORD = 64 << 20
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.(donor|gone|(\d{1,4})of(\d{1,4})\.kv)")
_WRITER = re.compile(r"([0-9a-f]{16})(?:\.lease|-[0-9a-f]{8}\.)")


@dataclass(frozen=True, slots=True, eq=False)
class DonorRecord:
    """One published donor. ``expires_unix_s``: nobody uses it from then on; None for never."""

    key: str
    donor_id: str
    namespace: Namespace
    tokens: TokenArray
    ranks: int
    created_unix_s: float
    expires_unix_s: float | None = None

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.tokens, namespace=self.namespace)

    @property
    def tokens_digest(self) -> str:
        """What a KV file repeats, so that it cannot be taken for that of another prompt."""
        return digest_tokens(self.namespace, self.tokens)

    def has_expired(self, now_unix_s: float) -> bool:
        return self.expires_unix_s is not None and self.expires_unix_s <= now_unix_s

    def count_ttl_s(self, now_unix_s: float) -> float | None:
        """For how long a store may keep it that takes it in now; None for ever."""
        return None if self.expires_unix_s is None else max(1.0, self.expires_unix_s - now_unix_s)

    def encode(self) -> bytes:
        """The whole file: magic, SHA-256 of the rest, length of the head, head (JSON), token ids."""
        head = {
            "key": self.key,
            "donor_id": self.donor_id,
            "namespace": asdict(self.namespace),
            "namespace_digest": self.namespace.digest,
            "ranks": self.ranks,
            "created_unix_s": self.created_unix_s,
            "expires_unix_s": self.expires_unix_s,
        }
        packed = json.dumps(head).encode()
        body = len(packed).to_bytes(4, "little") + packed + self.tokens.astype("<i4").tobytes()
        return MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def decode(cls, content: bytes, key: str) -> DonorRecord:
        """The record of ``key``; raises ValueError when it is damaged, or another's."""
        body = content[len(MAGIC) + 32 :]
        if content[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != content[len(MAGIC) : len(MAGIC) + 32]:
            raise ValueError("the record is damaged")
        end = 4 + int.from_bytes(body[:4], "little")
        head: dict[str, Any] = json.loads(body[4:end])
        namespace = Namespace(**head["namespace"])
        if head["key"] != key or namespace.digest != head["namespace_digest"]:
            raise ValueError("the record is of another donor")
        tokens = np.frombuffer(body[end:], "<i4").astype(np.int32)
        expires = head["expires_unix_s"]
        return cls(key, head["donor_id"], namespace, tokens, head["ranks"], head["created_unix_s"], expires)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a listing shows of one key; ``names`` are all its files, temporary ones too.

    ``ranks``: of the engine that wrote it, by the names of its KV files; 0 where there are none, or they do not agree.
    """

    names: frozenset[str] = frozenset()
    ranks: int = 0
    withdrawn: bool = False
    complete: bool = False


def digest_tokens(namespace: Namespace, tokens: TokenArray) -> str:
    """A short digest of a prompt in its namespace."""
    return hashlib.sha256(namespace.digest.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:32]


def new_writer_id() -> str:
    return secrets.token_hex(8)


def make_key(writer: str, serial: int) -> str:
    return f"{writer}-{serial:08x}"


def writer_of(name: str) -> str | None:
    """Whose file this is, temporary ones included; None for a name that is not of the directory."""
    found = _WRITER.match(name)
    return found[1] if found else None


def record_name(key: str) -> str:
    return f"{key}.donor"


def withdrawn_name(key: str) -> str:
    return f"{key}.gone"


def kv_name(key: str, rank: int, ranks: int) -> str:
    return f"{key}.{rank}of{ranks}.kv"


def lease_name(writer: str) -> str:
    return f"{writer}.lease"


def is_key(text: str) -> bool:
    """Whether a donor id names a donor of the directory.

    >>> is_key("00112233aabbccdd-0000002a"), is_key("cmpl-17")
    (True, False)
    """
    return _NAME.fullmatch(f"{text}.donor") is not None


def describe_files(names: Iterable[str]) -> Listed:
    """What files of one key amount to.

    >>> describe_files(["00112233aabbccdd-00000001.donor", "00112233aabbccdd-00000001.0of1.kv"]).complete
    True
    """
    kept, kinds, parts, ranks = frozenset(names), set[str](), 0, set[int]()
    for name in kept:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        kinds.add(match[3])
        if match[5] is not None:
            parts += 1
            ranks.add(int(match[5]) if int(match[4]) < int(match[5]) else 0)
    count = ranks.pop() if len(ranks) == 1 else 0
    withdrawn = "gone" in kinds
    return Listed(kept, count, withdrawn, "donor" in kinds and not withdrawn and 0 < count == parts)


def is_part(name: str) -> bool:
    """Whether a file of that name is not whole yet."""
    return name.endswith(PART)
