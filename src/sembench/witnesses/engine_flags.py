"""Describes how the measured engine was started, and whether that is fair.

A fair engine has its exact prefix cache on (else reuse gets credit for exact hits), its statistics on (else nothing can
be confirmed) and speculative decoding off (else times and answers depend on the draft model).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from semblend.errors import InputError

UNFAIR_FLAGS = {
    "--no-enable-prefix-caching": "the exact prefix cache is off",
    "--disable-radix-cache": "the exact prefix cache is off",
    "--disable-log-stats": "the engine counts nothing",
    "--speculative-config": "speculative decoding is on",
    "--speculative-algorithm": "speculative decoding is on",
}

HIDDEN = "***"
_SECRET = re.compile(r"(?:^|[-_])(?:key|token|secret|password|credentials?)$", re.IGNORECASE)


def describe_engine_flags(command: str, env: Sequence[str]) -> dict[str, Any]:
    """Return the ``engine`` object of a result from the command line. Keys and tokens are not kept.

    >>> describe_engine_flags("vllm serve m --port 1 --disable-log-stats", [])["phase0_flag_violations"]
    ['--disable-log-stats: the engine counts nothing']
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"the engine's command cannot be read: {error}", hint="quote it as a shell would") from None
    words = _hide_secrets(words)
    flags: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            follows = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else True
            flags[name] = value if equals else follows
    settings = {}
    for pair in env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--engine-env {pair!r} is not NAME=VALUE", hint="for example --engine-env A=1")
        settings[name] = HIDDEN if _SECRET.search(name) else value
    violations = [f"{name}: {why}" for name, why in UNFAIR_FLAGS.items() if name in flags]
    return {
        "command": shlex.join(words) or None,
        "flags": flags if command else None,
        "env": settings,
        "phase0_flag_violations": violations,
        "phase0_flags_ok": not violations if command else None,
    }


def _hide_secrets(words: Sequence[str]) -> list[str]:
    """Return the words with the values of ``--api-key``, ``NAME_TOKEN=`` and the like replaced.

    >>> _hide_secrets(["HF_TOKEN=x", "vllm", "--api-key", "y", "--admin-key=z", "--max-tokens", "5"])
    ['HF_TOKEN=***', 'vllm', '--api-key', '***', '--admin-key=***', '--max-tokens', '5']
    """
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and _SECRET.search(name):
            kept.append(f"{name}={HIDDEN}")
        elif kept and kept[-1].startswith("--") and "=" not in kept[-1] and _SECRET.search(kept[-1]):
            kept.append(HIDDEN)
        else:
            kept.append(word)
    return kept


def require_fair_flags(flags: dict[str, Any]) -> None:
    """Refuse an engine whose command is unknown or unfair (``--require-phase0-flags``)."""
    if flags["flags"] is None:
        raise InputError("the engine's flags are not known", hint="give --engine-serve-command")
    if flags["phase0_flag_violations"]:
        raise InputError(
            "the engine was started unfairly: " + "; ".join(flags["phase0_flag_violations"]),
            hint="start it without these flags",
        )
