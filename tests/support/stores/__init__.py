"""Stores for tests: one in memory, a real S3 server, a proxy that misbehaves."""
