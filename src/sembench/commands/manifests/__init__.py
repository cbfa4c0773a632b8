"""Commands that make, check and freeze manifests.

None of them talks to a server.
"""
