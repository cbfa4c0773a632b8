"""How a request's tokens are drawn: one class for the HTTP APIs and for the engine's sampler. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.errors import InputError

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 0.01
"""Lower temperatures are raised to this one, as in vLLM: logits divided by less could overflow. 0 is greedy."""
MIN_PENALTY = 0.01
"""A repetition penalty divides logits; by less than this they could overflow."""
SMALLEST_NORMAL = 2.0**-126
"""Below this a float32 is subnormal: some kernels read it as 0 and others do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen and when they end.

    ``max_tokens`` None: as many as fit the context. ``temperature`` 0 is greedy; one between 0 and 0.01 is raised
    to 0.01. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``repetition_penalty`` above 1 makes tokens of the
    prompt and the answer less likely to come again. ``frequency_penalty`` (for each time) and ``presence_penalty``
    (once) are taken from the logit of a token that the answer holds already. ``logit_bias`` adds to the logits of
    tokens. ``logprobs``: None for none, n for the chosen token's and the n best ones', as the model gave them
    (before bias, penalties, temperature and filters). ``stop`` strings end the answer wherever they fall and are
    not part of it; ``stop_token_ids`` end it and give no text. ``n`` answers are wanted.

    >>> Sampling(temperature=-1)
    Traceback (most recent call last):
    semblend.errors.InputError: temperature=-1 is outside [0, 100] (hint: 0 is greedy, 1 the model's own distribution)
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, 100, "0 is greedy, 1 the model's own distribution")
        _number("top_p", self.top_p, 0, 1, "1 is off", above=True)
        _number("min_p", self.min_p, 0, 1, "0 is off")
        _number("repetition_penalty", self.repetition_penalty, MIN_PENALTY, 100, "1 is off")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "0 is off")
        _number("presence_penalty", self.presence_penalty, -2, 2, "0 is off")
        for token, bias in self.logit_bias:
            _whole("a token of logit_bias", token, 0, (1 << 31) - 1, "token ids are 0 or more")
            _number("a value of logit_bias", bias, -100, 100, "-100 bans a token")
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 1 << 31, "ask for at least one token")
        _whole("top_k", self.top_k, 0, 1 << 31, "0 is off")
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 64) - 1, "a seed has 64 bits")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, "0 gives the chosen token's alone")
        _whole("n", self.n, 1, 1 << 31, "ask for at least one answer")
        object.__setattr__(self, "stop", _check_texts(self.stop))
        object.__setattr__(self, "stop_token_ids", frozenset(int(token) for token in self.stop_token_ids))
        self._keep_normal()

    def _keep_normal(self) -> None:
        """Move numbers that are too small for a kernel to the nearest ones that are not."""
        object.__setattr__(self, "temperature", floor_temperature(self.temperature))
        object.__setattr__(self, "top_p", max(self.top_p, SMALLEST_NORMAL))
        for name in ("min_p", "frequency_penalty", "presence_penalty"):
            object.__setattr__(self, name, flush_subnormal(getattr(self, name)))
        biases = tuple((token, flush_subnormal(bias)) for token, bias in self.logit_bias)
        object.__setattr__(self, "logit_bias", biases)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether the distribution is cut, so that it has to be sorted."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def edits_logits(self) -> bool:
        """Whether the logits are changed before anything is chosen."""
        return bool(self.logit_bias or self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)


def floor_temperature(temperature: float) -> float:
    """Raise a temperature above 0 to `MIN_TEMPERATURE`; 0 stays 0.

    >>> floor_temperature(1e-38), floor_temperature(0), floor_temperature(0.7)
    (0.01, 0, 0.7)
    """
    return max(temperature, MIN_TEMPERATURE) if temperature else temperature


def flush_subnormal(value: float) -> float:
    """Turn a number that float32 cannot hold with full precision into 0.

    >>> flush_subnormal(-1e-40), flush_subnormal(0.5)
    (0.0, 0.5)
    """
    return value if abs(value) >= SMALLEST_NORMAL else 0.0


def _check_texts(stop: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise InputError("a stop string must be a non-empty string", hint="leave stop out, or pass a list of strings")
    return texts


def _number(name: str, value: float, low: float, high: float, hint: str, *, above: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not a number", hint=hint)
    if not low <= value <= high or (above and value == low):  # NaN fails too
        raise InputError(f"{name}={value!r} is outside {'(' if above else '['}{low}, {high}]", hint=hint)


def _whole(name: str, value: int, low: int, high: int, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name}={value!r} is not a whole number", hint=hint)
    if not low <= value <= high:
        raise InputError(f"{name}={value!r} is outside [{low}, {high}]", hint=hint)
