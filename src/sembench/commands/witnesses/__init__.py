"""Commands that collect evidence from engines: logs, counters, Kubernetes.

None of them changes a result.
"""
