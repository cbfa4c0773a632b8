"""Cases, the documents and transforms they are made of, and frozen sets of them.

Nothing here asks an engine or scores an answer.
"""
