"""What really happened: receipts, the ledger, events, sinks and metrics.

Reuse is counted here and only from receipts; nothing here plans.
"""
