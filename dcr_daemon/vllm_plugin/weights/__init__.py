"""Runs in each worker process: where the canonical elements lie in live memory, and how it is read, summed and written.

Input: rows of a `Placement` and arrays of bits. Output: sums and old bits. Called by `worker`; decides nothing.
"""
