"""Traces: each process writes when its phases of an update or a refit ran, and `dcr trace` merges their files."""
