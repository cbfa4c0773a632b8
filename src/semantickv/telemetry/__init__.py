"""What became of each request: one record, read from the answer as it passes, and its metrics and traces.

Nothing here delays a byte or keeps a prompt's text, unless the operator asks for text.
"""
