"""Runs in the EngineCore process, on its one thread: who may change the weights, and when."""
