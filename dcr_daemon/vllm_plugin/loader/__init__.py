"""Runs in each worker process: where vLLM's own loader puts canonical elements, and what it computes."""
