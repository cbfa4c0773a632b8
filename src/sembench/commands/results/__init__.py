"""Commands that read result files: gates, comparison, merge, report.

None of them talks to a server.
"""
