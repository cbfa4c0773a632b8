"""What really happened: receipts, the ledger, events, sinks and metrics."""
