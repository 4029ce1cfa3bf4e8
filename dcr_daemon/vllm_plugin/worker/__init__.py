"""Runs in each worker process: prepares, applies and commits one change of its weights.

In come `calls.Call` records from EngineCore (`extension`), out go `calls.Reply` records. `session` holds the state,
`attachment` what an attach found, `jobs` the background thread, `transaction` one change.
"""
