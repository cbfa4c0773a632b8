"""The engine itself: requests, scheduler, paged KV, exact prefix cache, and the use of plans.

Nothing here knows about HTTP or about the layers of a model.
"""
