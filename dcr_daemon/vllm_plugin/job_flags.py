"""Flags in shared memory that say which ranks' jobs have ended, so that EngineCore need not ask the workers.

EngineCore creates the flags, and each worker opens them at `hello`, by path. A blocking call to the workers waits until
they have computed every batch that vLLM has scheduled ahead. At 33 polls a second that would cost async scheduling and
pipeline parallelism their overlap. A flag is a hint and nothing else: EngineCore asks the workers when all flags are
set, and now and then without one, and believes only what they answer.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

SIZE = mmap.PAGESIZE  #: bytes, one per rank
SHARED_MEMORY = "/dev/shm"


class JobFlags:
    """One flag per rank. `path` is where workers open them; `hide` removes it, and those who have opened it go on."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` if the file cannot be opened, as on another host."""
        self.path = path
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)

    @classmethod
    def create(cls) -> JobFlags:
        """Raises `OSError` if no temporary file can be made, or its file system is full."""
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="dcr-jobs-", dir=place)
        try:
            os.posix_fallocate(handle, 0, SIZE)  # a hole on a full file system would end the process at the first write
        except OSError:
            Path(path).unlink()
            raise
        finally:
            os.close(handle)
        return cls(path)

    def hide(self) -> None:
        Path(self.path).unlink()

    def set(self, rank: int, ended: bool) -> None:
        self._memory[rank % SIZE] = ended

    def all_set(self, ranks: list[int]) -> bool:
        return all(self._memory[rank % SIZE] for rank in ranks)
