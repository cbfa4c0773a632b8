"""The applications: telemetry proxy, locality router and simulation API, each an ASGI ``app`` for uvicorn.

They put `edge`, `routing` and `telemetry` together and decide nothing themselves.
"""
