"""What /openapi.json says: the server's routes, bodies and answers as models.

Nothing here answers a request. Bodies are the models of `semblend.wire`; answers are described in `replies` and
`pages`, and tests hold the real ones to them.
"""
