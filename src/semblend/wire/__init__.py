"""Requests and replies of OpenAI's and SGLang's HTTP APIs as checked data.

No web framework and no torch: the server, the proxy and the router share it.
"""
