"""Canonical coordinates: what a tensor is called, how it is typed, and what its content sums to.

Pure and synchronous; numpy and numba only (numba is imported when a kernel is first needed).
"""
