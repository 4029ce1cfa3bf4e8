"""Runs in each worker process: prepares, applies and commits one change of its weights.

Input: `calls.Call` records from EngineCore (`extension`). Output: `calls.Reply` records. `session` holds the state,
`attachment` what an attach found, `jobs` the background thread, `transaction` one change.
"""
