"""Runs inside vLLM: EngineCore's half, the endpoint's socket, the worker's hands."""
