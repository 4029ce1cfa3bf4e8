"""Runs in each worker process: prepares, applies and commits one change of its weights."""
