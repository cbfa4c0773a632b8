"""What would reuse save on logged prompts? A replay of the log through caches of bounded size, step by step.

No model runs and no KV exists here: the result is an estimate from tokens, and only an engine's receipt can confirm it.
"""

from semblend.estimate.replay import Replay, ReplayOptions

__all__ = ["Replay", "ReplayOptions"]
