"""stdout and stderr as they are used unattended: whoever reads them may go away, and a daemon lives on."""

from __future__ import annotations

import os
from typing import TextIO


def put(stream: TextIO, text: str) -> None:
    """Write `text` now. What nobody reads any more is dropped, this text and all later ones.

    Raises:
        OSError: it cannot be written for any other reason, such as a full disk under a redirected stream.
    """
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    """Lead a broken pipe to nowhere, so that the interpreter's own flush at exit does not fail either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
