"""The messages between routers. No text: keyed hashes, counts, and digests of the replicas' addresses."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

MOST_BYTES = 1 << 20
"""Of one entry; larger ones are not read."""
MOST_KEYS = 4096
"""Hashes in one message."""

Key = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits: msgpack has no larger numbers."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Running = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
WaitingTokens = Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]
"""More than one router can have on a replica is not believed, whoever says so."""
Name = Annotated[str, msgspec.Meta(max_length=64)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]
Counts = Annotated[list[Count], msgspec.Meta(max_length=MOST_KEYS)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Scope = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Digests = Annotated[list[Digest], msgspec.Meta(min_length=1, max_length=MOST_KEYS)]


class Placed(msgspec.Struct, frozen=True, tag="placed", array_like=True):
    """A prompt went to a replica: its pieces, as `PromptPieces` has them. ``home`` is the session's key, or 0."""

    replica: Name
    hashes: Keys
    chains: Keys
    tokens: Counts
    home: Key = 0


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """An engine refused a prompt that was `Placed`: these pieces and chains came with it, and are not there."""

    replica: Name
    keys: Keys


class Known(msgspec.Struct, frozen=True, tag="known", array_like=True):
    """A part of what a router remembers of a replica, oldest first."""

    replica: Name
    keys: Keys
    tokens: Counts


class Ordered(msgspec.Struct, frozen=True, tag="ordered", array_like=True):
    """Passages went to a replica in this order: `semblend.arrange.Sent` without its name."""

    replica: Name
    owner: Digest
    scope: Scope
    root: Digest
    keys: Digests
    sizes: Counts


class Failing(msgspec.Struct, frozen=True, tag="failing", array_like=True):
    """A replica does not answer this router. Others look for themselves."""

    replica: Name


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """What this router has on a replica at this moment."""

    replica: Name
    running: Running
    waiting_tokens: WaitingTokens


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """This router came, or came back: tell it what you know."""


Message = Placed | Refused | Known | Ordered | Failing | Load | Hello
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])


def write_messages(messages: list[Message]) -> bytes:
    """Write messages as one entry."""
    return _encoder.encode(messages)


def read_messages(data: bytes) -> list[Message] | None:
    """Read an entry; None if it is none of ours.

    >>> read_messages(write_messages([Hello()])), read_messages(b"garbage")
    ([Hello()], None)
    """
    if len(data) > MOST_BYTES:
        return None
    try:
        messages = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return messages if all(map(_is_even, messages)) else None


def name_replica(url: str) -> str:
    """The name of a replica between routers: a digest of its address, whatever each router calls it."""
    return hashlib.blake2b(url.encode(), digest_size=8, person=b"semantickv.share").hexdigest()


def _is_even(message: Message) -> bool:
    """Whether the lists of a message belong together."""
    if isinstance(message, Placed):
        return len(message.hashes) == len(message.chains) == len(message.tokens)
    if isinstance(message, Ordered):
        return len(message.keys) == len(message.sizes)
    return not isinstance(message, Known) or len(message.keys) == len(message.tokens)
