"""Trials with small synthetic tensors that prove a map before real weights are read through it."""
