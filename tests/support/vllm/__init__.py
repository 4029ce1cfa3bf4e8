"""Engines: toy models and workers, a whole engine in one process, real vLLM servers."""
