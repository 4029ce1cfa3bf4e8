"""Places where a stream lives: one port, a directory and S3-compatible buckets."""
