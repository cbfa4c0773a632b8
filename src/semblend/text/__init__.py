"""Text at the edge: chat messages, logged prompts, and tokenizers for places where no engine is at hand.

Nothing here knows about KV or about engines.
"""
