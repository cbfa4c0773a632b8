"""ContextPilot's order of passages, one prompt after the other; run by bench/arrange.py with a checkout of it.

Nothing of it is imported but its live index, which needs no service: its package's own ``__init__`` loads engines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
import types
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--checkout", "--asked", "--out"):
        parser.add_argument(flag, required=True)
    args = parser.parse_args()
    index = load_index(Path(args.checkout))
    orders, seconds = [], []
    for prompt in json.loads(Path(args.asked).read_text()):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints several lines a prompt
            started = time.thread_time()
            reordered, _ = index.reorder([str(passage) for passage in prompt])
            seconds.append(time.thread_time() - started)
        orders.append([int(passage) for passage in reordered[0]])
    Path(args.out).write_text(json.dumps({"orders": orders, "seconds": seconds}))


def load_index(checkout: Path):  # type: ignore[no-untyped-def]
    """Its `ContextPilot` class, from empty parent packages over the checkout's folders."""
    for name in ("contextpilot", "contextpilot.server"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package
    from contextpilot.server.live_index import ContextPilot  # type: ignore[import-not-found]

    return ContextPilot(use_gpu=False)


if __name__ == "__main__":
    main()
