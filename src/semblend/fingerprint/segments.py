"""Windows spread over a whole prompt, so that an embedder with a short reach still sees all of it.

An embedding of the first few thousand characters makes every prompt behind one long system preamble look the same.
Windows here always include the first and the last character, are evenly spread between them, and are at most
``limit``: beyond that, gaps open between them, equally large everywhere. Same input, same windows, on any machine.
"""

from __future__ import annotations

from semblend.prompt import TokenArray

_SNAP_CHARACTERS = 24  # how far a window's edge may move to avoid cutting a word


def spread_windows(length: int, *, size: int, overlap: int, limit: int) -> tuple[tuple[int, int], ...]:
    """Spread half-open ``(start, end)`` windows of ``size`` over ``length`` items, sharing ``overlap`` items or more.

    Where that would take more than ``limit`` windows, there are ``limit`` of them, with gaps between.

    >>> spread_windows(10, size=4, overlap=1, limit=8)
    ((0, 4), (3, 7), (6, 10))
    >>> spread_windows(1000, size=4, overlap=1, limit=3)
    ((0, 4), (498, 502), (996, 1000))
    """
    if not 0 <= overlap < size or limit < 1:
        raise ValueError(f"windows need 0 <= overlap < size and limit >= 1, got {overlap=}, {size=}, {limit=}")
    if length <= 0:
        return ()
    if length <= size:
        return ((0, length),)
    needed = -(-(length - overlap) // (size - overlap))  # ceiling division
    count = min(needed, limit)
    if count == 1:  # one window cannot touch both ends: take the middle
        start = (length - size) // 2
        return ((start, start + size),)
    last = length - size
    return tuple((last * i // (count - 1), last * i // (count - 1) + size) for i in range(count))


def cut_text_windows(text: str, *, size: int = 900, overlap: int = 100, limit: int = 16) -> tuple[str, ...]:
    """Cut windows of about ``size`` characters over the whole text, between words where words are short.

    >>> cut_text_windows("one two three four five", size=11, overlap=2, limit=2)
    ('one two', 'four five')
    """
    pieces = (
        _cut_between_words(text, start, end)
        for start, end in spread_windows(len(text), size=size, overlap=overlap, limit=limit)
    )
    return tuple(piece for piece in pieces if piece)


def cut_token_windows(
    token_ids: TokenArray, *, size: int = 4096, overlap: int = 0, limit: int = 16
) -> tuple[TokenArray, ...]:
    """Cut windows of token ids, for prompts that come without text. Views, not copies."""
    return tuple(
        token_ids[start:end] for start, end in spread_windows(len(token_ids), size=size, overlap=overlap, limit=limit)
    )


def _cut_between_words(text: str, start: int, end: int) -> str:
    """Return ``text[start:end]`` without a torn word at either edge; text without spaces is cut where it is."""
    if start > 0 and not text[start - 1].isspace():
        start = next((i for i in range(start, min(start + _SNAP_CHARACTERS, end)) if text[i].isspace()), start)
    if end < len(text) and not text[end].isspace():
        end = next((i for i in range(end, max(end - _SNAP_CHARACTERS, start), -1) if text[i - 1].isspace()), end)
    return text[start:end].strip()
