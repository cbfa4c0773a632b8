"""What is asked: cases, the documents and transforms they are made of, and frozen sets of them.

Nothing here talks to a server or scores an answer.
"""
