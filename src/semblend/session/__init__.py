"""One life of a request, whatever engine it runs in.

session    `ReuseSession`: where one request is, what it may do next, what became of its load
sessions   `Sessions`: what all engines decide alike: whether to reuse, how much to claim, what to keep, what to report
local      `LocalSessions`: the same for engines that schedule and compute in one process; gives slots and moves KV
settings   `LocalSettings`: what such an engine can be told

An adapter translates between its engine and a session, and decides nothing.
"""
