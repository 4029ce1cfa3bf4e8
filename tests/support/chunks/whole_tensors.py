"""Whole canonical tensors as a baseline to undo chunks in."""

from __future__ import annotations

from typing import Any

from dcr_daemon.codec.undo import Locate


def in_whole(tensors: Any) -> Locate:
    """`tensors`: flat lanes of each by layout index, a list or a dict."""
    return lambda segment, ordinals: (tensors[segment.tensor], segment.box.canonical(ordinals))
