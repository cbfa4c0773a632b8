"""The one request: what the HTTP APIs are parsed into and what an engine answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from semblend.errors import InputError
from semblend.prompt import Prompt
from semblend.quality import parse_quality
from semblend.wire.sampling import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt in tokens and how to answer it; ``index`` says which of several answers to the prompt this one is.

    The prompt's ``namespace`` and ``cache_salt`` are walls: neither exact blocks nor donors cross them. ``quality``
    overrides the engine's mode for this request; ``opt_out`` wants neither to use donors nor to become one. ``base`` is
    the request that this one was edited from, where its caller says so.

    >>> [one.request_id for one in Request("r", Prompt([1, 2, 3]), Sampling(n=2)).split_answers()]
    ['r-0', 'r-1']
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    quality: str | None = None
    cache_salt: str = ""
    opt_out: bool = False
    index: int = 0
    base: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InputError("a request id must be a non-empty string", hint="use a fresh id for every request")
        if not isinstance(self.prompt, Prompt):
            raise InputError(f"expected a Prompt, got {type(self.prompt).__name__}", hint="Prompt(token_ids)")
        if self.quality is not None:
            object.__setattr__(self, "quality", parse_quality(self.quality))
        if not isinstance(self.cache_salt, str):
            raise InputError(f"cache_salt is {type(self.cache_salt).__name__}, not str", hint="pass a string")

    def check_fits(self, max_length: int, vocab: int) -> None:
        """Raise `InputError` where a context of ``max_length`` tokens and ``vocab`` token ids cannot answer this."""
        if self.sampling.n != 1:
            raise InputError(f"{self.sampling.n} answers are wanted", hint="submit each of request.split_answers()")
        length = len(self.prompt)
        if length >= max_length:
            raise InputError(
                f"the prompt has {length} tokens, and this engine takes {max_length - 1} at most",
                hint="shorten the prompt, or serve with a larger context and KV pool",
            )
        highest = int(self.prompt.token_ids.max())
        if highest >= vocab:
            raise InputError(
                f"token id {highest} is outside the model's vocabulary of {vocab}",
                hint="tokenize with the model's own tokenizer",
            )
        foreign = [token for token, _ in self.sampling.logit_bias if token >= vocab]
        if foreign:
            raise InputError(
                f"logit_bias names token {foreign[0]}, and the model's vocabulary has {vocab}",
                hint="name token ids of this model's tokenizer",
            )

    def place_in_namespace(self, **defaults: str) -> Prompt:
        """The prompt in the namespace its KV belongs to; ``defaults`` fill fields that are empty."""
        namespace = self.prompt.namespace
        filled = {name: value for name, value in defaults.items() if value and not getattr(namespace, name)}
        if self.cache_salt:
            # a pair, not a sum: ("a", "bc") and ("ab", "c") are different walls
            filled["salt"] = f"{len(namespace.salt)}:{namespace.salt}{self.cache_salt}"
        return Prompt(self.prompt.token_ids, self.prompt.text, replace(namespace, **filled))

    def split_answers(self) -> tuple[Request, ...]:
        """One request for each of the ``sampling.n`` answers; with a seed, each draws with its own."""
        if self.sampling.n == 1:
            return (self,)
        seed = self.sampling.seed
        return tuple(
            replace(
                self,
                request_id=f"{self.request_id}-{i}",
                sampling=replace(self.sampling, n=1, seed=None if seed is None else seed + i),
                index=i,
            )
            for i in range(self.sampling.n)
        )
