"""What a prompt looks like: hashes of its k-grams, and for evidence a sketch or an embedding."""
