"""Commands that collect evidence from engines: logs, counters, logs from Kubernetes.

None of them changes a result.
"""
