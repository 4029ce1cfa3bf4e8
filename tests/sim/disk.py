"""Machines: one directory each, on a real (RAM) file system, and what a crash leaves of it.

A killed process leaves everything as it was at that instant: clean-up that runs while its stack unwinds is taken
back. A machine that loses power keeps what was fsynced, and of the rest any part: of the bytes since the file's last
fsync, of the names since the directory's. Renames are atomic, as journalling file systems have it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import sys
from pathlib import Path

PAGE = 512  #: bytes that reach the disk or not, together

_locks: dict[int, tuple[str, object]] = {}
_listening = False


def listen_for_locks(owner: object) -> None:
    """Note who takes which flock, so that a dead process's can be let go: its stack is never unwound."""
    global _listening
    _locks.clear()
    _Owner.now = owner
    if not _listening:
        _listening = True
        sys.addaudithook(_heard)


class _Owner:
    now: object = None


def _heard(event: str, args: tuple[object, ...]) -> None:
    if event == "fcntl.flock" and _Owner.now is not None:
        descriptor = int(args[0])  # type: ignore[call-overload]
        with contextlib.suppress(OSError):
            _locks[descriptor] = (str(Path(f"/proc/self/fd/{descriptor}").readlink()), _Owner.now())  # type: ignore[operator]


def release_locks(process: object) -> None:
    """What the kernel does for a dead process. The descriptor stays valid, on nothing, for whoever closes it later."""
    for descriptor, (path, holder) in list(_locks.items()):
        if holder is process:
            del _locks[descriptor]
            with contextlib.suppress(OSError):
                if str(Path(f"/proc/self/fd/{descriptor}").readlink()) == path:
                    null = os.open(os.devnull, os.O_RDONLY)
                    os.dup2(null, descriptor)
                    os.close(null)


class Machine:
    """A host with a disk at `root / "disk"` and a tmpfs at `root / "ram"`."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.disk, self.ram = root / "disk", root / "ram"
        self.disk.mkdir(parents=True)
        self.ram.mkdir()
        self.full = False
        self._bytes: dict[int, bytes] = {}  # by inode: what was fsynced last
        self._names: dict[Path, dict[str, int]] = {}  # by directory: its names at its last fsync

    def synced(self, path: Path) -> None:
        """A file's bytes or a directory's names are durable now."""
        with contextlib.suppress(OSError):
            if path.is_dir():
                self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self._bytes[path.stat().st_ino] = path.read_bytes()

    def keep_all(self) -> None:
        """Everything here now is durable: what a machine is set up with."""
        for directory, _, files in os.walk(self.disk):
            self.synced(Path(directory))
            for name in files:
                self.synced(Path(directory) / name)

    # A process is killed.

    def snapshot(self) -> dict[Path, bytes | None]:
        """Contents by path; None for a directory."""
        found: dict[Path, bytes | None] = {}
        for top in (self.disk, self.ram):
            for directory, _, files in os.walk(top):
                found[Path(directory)] = None
                for name in files:
                    path = Path(directory) / name
                    if stat.S_ISREG(path.lstat().st_mode):
                        found[path] = path.read_bytes()
        return found

    def restore(self, snapshot: dict[Path, bytes | None]) -> None:
        """Back to a snapshot, file by file, so that what nobody touched keeps its inode."""
        now = self.snapshot()
        for path in sorted(now.keys() - snapshot.keys(), reverse=True):
            if now[path] is None:
                path.rmdir()
            else:
                path.unlink()
        for path, body in sorted(snapshot.items()):
            if body is None:
                path.mkdir(exist_ok=True)
            elif now.get(path) != body:
                with path.open("r+b" if path.exists() else "w+b") as file:
                    file.truncate(len(body))
                    file.write(body)

    # The machine loses power.

    def lose_power(self, rng: random.Random) -> int:
        """Lose any part of what was not durable; how many files and names that were."""
        shutil.rmtree(self.ram)
        self.ram.mkdir()
        lost = self._lose_names(rng)
        for directory, _, files in os.walk(self.disk):
            for name in files:
                lost += self._lose_bytes(Path(directory) / name, rng)
        self._bytes.clear()
        self._names.clear()
        self.keep_all()
        return lost

    def _lose_names(self, rng: random.Random) -> int:
        """Per changed name: the old state or the new one. A file that would be lost in a rename keeps its new name."""
        lost = 0
        here = {Path(d): {e.name: e.inode() for e in os.scandir(d)} for d, _, _ in os.walk(self.disk)}
        places: dict[int, list[tuple[Path, str]]] = {}
        for directory, names in here.items():
            for name, inode in names.items():
                places.setdefault(inode, []).append((directory, name))
        stash = self.disk.parent / "stash"
        stash.mkdir()
        homes: dict[int, Path] = {}
        for inode, where in places.items():
            path = where[0][0] / where[0][1]
            if not path.is_dir():
                homes[inode] = stash / str(inode)
                os.link(path, homes[inode])
        durable = {inode for names in self._names.values() for inode in names.values()}
        for directory in sorted(here):
            old, new = self._names.get(directory, {}), here[directory]
            for name in sorted(old.keys() | new.keys()):
                before, after = old.get(name), new.get(name)
                if before == after or rng.random() < 0.5 or (after is not None and after not in homes):
                    continue
                moved = any(inode in durable and inode != before for inode in [after])
                if moved or (before is not None and before not in homes and before not in self._bytes):
                    continue  # the old file lives on under another name, or nothing of it is left to show
                lost += 1
                path = directory / name
                path.unlink(missing_ok=True)
                if before is not None and before in homes and homes[before].stat().st_nlink == 1:
                    os.link(homes[before], path)
                elif before is not None and before in self._bytes:
                    path.write_bytes(self._bytes[before])
        shutil.rmtree(stash)
        return lost

    def _lose_bytes(self, path: Path, rng: random.Random) -> int:
        body = path.read_bytes()
        known = self._bytes.get(path.stat().st_ino, b"")
        if body == known or rng.random() < 0.3:
            return 0
        size = len(body) if rng.random() < 0.5 else rng.choice((len(known), rng.randint(0, len(body))))
        pages = [
            (body if rng.random() < 0.5 else known.ljust(len(body), b"\0"))[at : at + PAGE]
            for at in range(0, len(body), PAGE)
        ]
        with path.open("r+b") as file:
            file.write(b"".join(pages)[:size])
            file.truncate(size)
        return 1
