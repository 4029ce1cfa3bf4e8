"""What tests share: stores, streams, process groups, engines, faults. README.md has a line for each module.

`tests/` is on the import path (see `tests/conftest.py`), the repository root is not: what is tested is the built wheel.
"""
