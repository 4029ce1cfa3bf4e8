"""Safetensors headers and Hugging Face directories: read and write."""
