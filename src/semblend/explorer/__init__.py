"""The explorer: a local page that shows which tokens of a prompt earlier prompts already hold, and why.

It uses the public library and no model. Its page stands in ``web/static``; this is what answers it.
"""
