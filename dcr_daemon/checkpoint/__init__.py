"""Hugging Face checkpoints on disk: safetensors headers and files, directories of shards, pieces of anchors."""
