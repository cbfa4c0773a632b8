"""Which KV can this request reuse, and reuse it.

Find the earlier prompts that hold the work, prove which token spans are equal, plan their reuse, and count it only
when a backend confirms it::

    sb = SemBlend()
    sb.register(Prompt(token_ids), donor_id="req-1")
    match sb.lookup(Prompt(new_token_ids)):
        case ReusePlan() as plan: ...
        case Decline(reason, detail): ...
"""

from semblend._version import __version__
from semblend.config import SemBlendConfig, load_config
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.discover.donor import Donor
from semblend.errors import (
    CapacityError,
    ConfigError,
    InputError,
    MissingDependencyError,
    NamespaceError,
    ReceiptError,
    SemBlendError,
    StoreError,
    TokenError,
)
from semblend.explanation import Explanation
from semblend.facade import SemBlend
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan, Similar
from semblend.prompt import Namespace, Prompt
from semblend.span import Span

__all__ = [
    "CapacityError",
    "ConfigError",
    "Decline",
    "DeclineReason",
    "Donor",
    "Explanation",
    "InputError",
    "MissingDependencyError",
    "Namespace",
    "NamespaceError",
    "Outcome",
    "Prompt",
    "Receipt",
    "ReceiptError",
    "ReusePlan",
    "SemBlend",
    "SemBlendConfig",
    "SemBlendError",
    "Similar",
    "Span",
    "StoreError",
    "TokenError",
    "__version__",
    "load_config",
]
