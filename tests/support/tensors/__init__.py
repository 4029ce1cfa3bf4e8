"""Regions and partitions of canonical tensors, as hypothesis strategies and by seed."""
