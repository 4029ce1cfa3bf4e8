"""Checkpoints in pieces: torch's distributed checkpoints and sharded safetensors files, read in place.

In comes a directory (its tables are read as data, nothing in them is run); out go pieces with their places in files
(piece_map.py) and their elements (storage.py). The watcher of sharded checkpoints calls it.
"""
