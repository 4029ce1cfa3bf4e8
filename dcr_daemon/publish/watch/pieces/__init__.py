"""Checkpoints whose tensors are stored in pieces: torch's distributed checkpoints, and files of a sharded writer."""
