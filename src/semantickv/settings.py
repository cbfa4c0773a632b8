"""Everything that semantickv reads from the environment. No other module reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from semblend.errors import ConfigError

VARIABLES = {
    "SEMANTICKV_UPSTREAM_BASE_URL": "Server that `semantickv collect` forwards to; stands in for --upstream.",
    "SEMANTICKV_TRACE_OUTPUT_DIR": "Folder for collected traces; stands in for --output-dir of `semantickv collect`.",
    "SEMANTICKV_REDACT_TEXT": "false keeps the prompts' text in collected traces; true (default) keeps hashes only.",
    "SEMANTICKV_PROXY_TIMEOUT_SECONDS": "How long `semantickv collect` waits for its upstream (default 600).",
    "SEMANTICKV_HASH_KEY": "Secret that keys the hashes of collected traces, so that short texts cannot be guessed.",
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def read_variable(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Read a variable of `VARIABLES`; empty if it is not set.

    >>> read_variable("SEMANTICKV_REDACT_TEXT", {})
    ''
    """
    if name not in VARIABLES:
        raise KeyError(f"{name} is not listed in semantickv.settings.VARIABLES")
    return (os.environ if environ is None else environ).get(name, "")


def read_flag(name: str, default: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Read a variable that is true or false.

    >>> read_flag("SEMANTICKV_REDACT_TEXT", True, {"SEMANTICKV_REDACT_TEXT": "no"})
    False
    """
    value = read_variable(name, environ).strip().lower()
    if not value:
        return default
    if value not in _TRUE + _FALSE:
        raise ConfigError(f"{name}={value} is neither true nor false", hint="write true or false")
    return value in _TRUE


def read_number(name: str, default: float, environ: Mapping[str, str] | None = None) -> float:
    """Read a variable that is a number above zero.

    >>> read_number("SEMANTICKV_PROXY_TIMEOUT_SECONDS", 600.0, {"SEMANTICKV_PROXY_TIMEOUT_SECONDS": "30"})
    30.0
    """
    text = read_variable(name, environ)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={text} is not a number above 0", hint="seconds, for example 600")
    return value
