"""What `dcr verify` does: read all records and objects of a stream and say which are damaged, and what can be done.

In comes a store, out goes a report; nothing is written. `verify` leads, `replay` folds all records, `checks` reads one
version or one anchor, `repairs` says what can still be done about a damage. Daemons use none of it.
"""
