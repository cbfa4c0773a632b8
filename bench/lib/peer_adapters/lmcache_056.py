"""The any-offset matcher of LMCache 0.5.6 (BlendTokenRangeMatcher), in its own environment.

It indexes whole chunks of a stored prompt (256 tokens by default) and looks for them at every offset of a query. Its
results name a storage key for each chunk; the keys here are chained hashes of the chunks, as its own store makes them.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

import numpy as np
from _protocol import Cases, RawSpan, serve


class LmcacheMatcher:
    def __init__(self, cases: Cases) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
        from lmcache.v1.multiprocess.modules.blend.matcher import BlendTokenRangeMatcher

        logging.disable(logging.WARNING)  # it logs a line for each lookup, which would be part of its time
        self.chunk = cases.args.chunk
        self.matcher = BlendTokenRangeMatcher(chunk_size=self.chunk)
        self.owner: dict[bytes, str] = {}

    def register(self, donor_id: str, ids: list[int]) -> None:
        keys, key = [], b""
        for start in range(0, len(ids) - self.chunk + 1, self.chunk):
            key = hashlib.sha256(key + np.array(ids[start : start + self.chunk], np.uint32).tobytes()).digest()
            keys.append(key)
            self.owner.setdefault(key, donor_id)
        self.matcher.on_new_token_hashes(ids, keys)

    def lookup(self, ids: list[int]) -> Any:
        return self.matcher.match_sub_sequence(ids)

    def spans(self, answer: Any) -> list[RawSpan]:
        return [(self.owner[m.hash], int(m.old_st), int(m.cur_st), int(m.cur_ed - m.cur_st)) for m in answer]


if __name__ == "__main__":
    serve(LmcacheMatcher, chunk=256)
