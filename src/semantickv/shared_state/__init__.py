"""What several routers tell each other through Redis: placements, load, hints about replicas that fail.

A router decides by what it knows itself. Redis carries news between routers and is never asked during a request: when
it is slow or gone, each router goes on with its own knowledge, and they meet again when it is back.
"""
