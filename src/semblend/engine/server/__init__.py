"""The OpenAI-compatible server: routes, tenants, limits, dashboard, metrics.

Nothing here touches tensors; an engine is reached through ``serving.ServingEngine`` alone.
"""
