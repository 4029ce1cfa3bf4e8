"""Writing to stdout and stderr of a process whose reader may go away while it runs."""

from __future__ import annotations

import os
from typing import TextIO


def put(stream: TextIO, text: str) -> None:
    """Write and flush `text`. If the reader has closed the pipe, this text and all later ones are dropped.

    Raises:
        OSError: it cannot be written for any other reason, such as a full disk under a redirected stream.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Replace a broken pipe by /dev/null, so that the interpreter's flush at exit does not fail either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
