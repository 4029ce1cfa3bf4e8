"""Every parser of bytes that come from outside: one function each, `bytes -> None`.

A target lets the parser's own typed errors pass and nothing else: any other exception, an accepted value that breaks a
promise, or more memory than `memory_limit` allows is a finding. Some targets take the bytes as they are; those named
`…_inside` read them as choices of how to spoil something valid whose checksums are then made to fit again, so that
what lies behind a digest is reached too.
"""

from __future__ import annotations

from fuzz import ledger_targets, process_targets, weight_targets  # noqa: F401  each registers its targets
from fuzz.harness import TARGETS, bounded

__all__ = ["TARGETS", "bounded"]
