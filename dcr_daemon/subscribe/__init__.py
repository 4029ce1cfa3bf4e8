"""A subscriber: keeps one replica's engine at the newest sealed version of a stream, or builds one as a checkpoint.

Input: the ledger's records and the objects that they name. Output: verified files and calls to an engine
(`engine.port`). `daemon` makes the parts and runs them: `follower` reads the ledger on, `fetch/` verifies and keeps
files, `driver` brings the engine from version to version, `scrub` and `engine_monitor` watch it, `status` reports.
`materialize` does the same once, for a directory. Called by `dcr subscribe` and `dcr materialize`.
"""
