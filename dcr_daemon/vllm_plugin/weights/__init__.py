"""Runs in each worker process: the live memory, and the kernels that read and write it."""
