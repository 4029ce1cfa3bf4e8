"""Chunks for tests: malformed ones, and tensors to apply them to."""
