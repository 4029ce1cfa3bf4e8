"""Faults made on purpose: crash scenes, requests that fail, a full disk, which of many cases a run tries."""
