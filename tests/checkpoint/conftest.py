"""Small safetensors files, written byte by byte where a writer would refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def raw_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a safetensors file from a header table and data, exactly as given."""

    def write(table: Any, data: bytes = b"", *, name: str = "raw.safetensors", length: int | None = None) -> Path:
        header = table if isinstance(table, bytes) else json.dumps(table).encode()
        size = len(header) if length is None else length
        path = tmp_path / name
        path.write_bytes(size.to_bytes(8, "little") + header + data)
        return path

    return write
