"""Checkpoints in pieces: distributed checkpoints and sharded files, read where they lie."""
