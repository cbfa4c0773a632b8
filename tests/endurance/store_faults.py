"""A store that is killed at any moment or used by many threads serves only whole and true donors."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from semblend import Decline, Prompt, ReusePlan, SemBlend, SemBlendConfig

MAX_DONORS = 20


def content(donor_id: str, version: int) -> np.ndarray:
    """The only tokens that this version of this donor may ever have; the first one is the version."""
    seed = zlib.crc32(f"{donor_id}:{version}".encode())
    body = np.random.default_rng(seed).integers(0, 50_000, 64 + seed % 3000)
    return np.concatenate([[version], body]).astype(np.int32)


def open_store(path: Path) -> SemBlend:
    return SemBlend(SemBlendConfig(embedder="none", metrics=False, store=str(path), max_donors=MAX_DONORS))


# -- killed at random moments ------------------------------------------------------------------------------------


def churn(path: Path, snapshot: Path, seed: int, acknowledge: int) -> None:
    """Register, replace, evict, forget and snapshot until killed; say before and after each step what it is."""
    rng = random.Random(seed)
    sb = open_store(path)
    os.write(acknowledge, b"ready\n")
    version = seed * 1_000_000
    while True:
        donor_id = f"d{rng.randrange(40)}"
        step = rng.choices(["register", "forget", "save"], [8, 1, 1])[0]
        version += 1
        os.write(acknowledge, f"begin {step} {donor_id} {version}\n".encode())
        if step == "register":
            sb.register(Prompt(content(donor_id, version)), donor_id=donor_id)
        elif step == "forget":
            sb.forget(donor_id)
        else:
            sb.save(snapshot)
        os.write(acknowledge, f"end {step} {donor_id} {version}\n".encode())


def kill_once(path: Path, snapshot: Path, seed: int) -> str:
    """Fork a churning child, kill it, check what it left; returns the step that was cut off."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            churn(path, snapshot, seed, writing)
        finally:
            os._exit(70)  # reached only by an error: the parent sees no kill
    os.close(writing)
    heard = b""
    while b"ready\n" not in heard and (more := os.read(reading, 65536)):
        heard += more
    time.sleep(random.Random(seed).uniform(0, 0.25))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise AssertionError(f"the child failed by itself: {heard!r}")
    while more := os.read(reading, 65536):
        heard += more
    os.close(reading)
    words = [line.split() for line in heard.decode().splitlines()[1:]]
    check_store(path, words)
    if snapshot.exists():
        check_store(snapshot, [])
    return words[-1][1] if words and words[-1][0] == "begin" else "between"


def check_store(path: Path, words: list[list[str]]) -> None:
    """Every donor whole and true, and the last acknowledged registration still there."""
    with open_store(path) as sb:
        donors = {donor.donor_id for donor in sb.donors()}
        for donor_id in donors:
            found = sb.donor_tokens(donor_id)
            assert found is not None
            expected = content(donor_id, int(found[0]))
            assert np.array_equal(found, expected), f"{donor_id} is not what was registered"
            plan = sb.lookup(Prompt(expected))
            assert isinstance(plan, ReusePlan), f"{donor_id} is there but cannot be found"
            assert plan.reused_tokens == len(expected)
        kept = [word for word in words if word[:2] == ["end", "register"]]
        begun = {word[2] for word in words[-1:] if word[:1] == ["begin"]}
        if kept:
            _, _, donor_id, version = kept[-1]
            forgotten = any(w[:3] == ["end", "forget", donor_id] for w in words[words.index(kept[-1]) :])
            if not forgotten and donor_id not in begun:
                tokens = sb.donor_tokens(donor_id)
                assert tokens is not None, f"{donor_id} was acknowledged and is lost"
                assert int(tokens[0]) == int(version), f"{donor_id} was acknowledged as {version}"


def kill_often(times: int) -> Counter[str]:
    """Kill ``times`` times over one store that lives on; returns which steps were cut off."""
    cut: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "warm") as warm:
        warm.warm_up()
        for n in range(times):
            cut[kill_once(Path(folder) / "store", Path(folder) / "snapshot", n + 1)] += 1
    return cut


# -- eight threads -----------------------------------------------------------------------------------------------


@dataclass
class Hammered:
    """What a run of many threads did and what went wrong."""

    steps: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    most_bytes: int = 0
    budget_bytes: int = 0


def hammer(threads: int, seconds: float) -> Hammered:
    """Register, look up, claim, forget from many threads at once on a store that is always full."""
    config = SemBlendConfig(embedder="none", metrics=False, max_donors=64, max_bytes=1 << 20)
    result = Hammered(budget_bytes=config.max_bytes)
    with SemBlend(config) as sb:
        sb.warm_up()
        until = time.monotonic() + seconds
        workers = [threading.Thread(target=_work, args=(sb, n, until, result)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return result


def _work(sb: SemBlend, seed: int, until: float, result: Hammered) -> None:
    rng = random.Random(seed)
    try:
        while time.monotonic() < until:
            donor_id = f"d{rng.randrange(100)}"
            step = rng.choice(["register", "lookup", "lookup", "claim", "forget", "stats"])
            _step(sb, step, donor_id, f"{seed}", rng, result)
            result.steps[step] += 1
    except Exception as error:
        result.errors.append(f"{type(error).__name__}: {error}")


def _step(sb: SemBlend, step: str, donor_id: str, request_id: str, rng: random.Random, result: Hammered) -> None:
    if step == "register":
        sb.register(Prompt(content(donor_id, 0)), donor_id=donor_id)
    elif step == "forget":
        sb.forget(donor_id)
    elif step == "stats":
        result.most_bytes = max(result.most_bytes, sb.stats().used_bytes)
    else:
        other = content(f"d{rng.randrange(100)}", 0)
        prompt = Prompt(np.concatenate([content(donor_id, 0)[10:], other]))
        decision = sb.lookup(prompt)
        if isinstance(decision, Decline):
            assert decision.reason in ("nothing_shared",), decision
            return
        for span in decision.spans:
            held = content(span.donor_id, 0)[span.donor_start : span.donor_end]
            assert np.array_equal(prompt.token_ids[span.target_start : span.target_end], held), "a stale span"
        if step == "claim" and isinstance(sb.claim(decision, request_id), ReusePlan):
            for span in decision.spans:
                tokens = sb.donor_tokens(span.donor_id)
                assert tokens is None or np.array_equal(tokens, content(span.donor_id, 0))
            sb.release(request_id)
