"""The one HTTP server that everything here listens with: connections, deadlines, limits, signals, the drain.

Nothing in it knows what a request asks for.
"""
