"""What a trainer writes to a directory: finished checkpoints are found, read and offered for publication."""
