"""What a prompt looks like: rolling hashes of its k-grams and, as evidence, a sketch or an embedding.

Nothing here remembers a prompt.
"""
