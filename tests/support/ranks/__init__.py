"""Training ranks for tests: a group in one process, real processes that publish, checks of what they published."""
