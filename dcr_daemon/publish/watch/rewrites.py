"""Checkpoints that are written again over old files, and which of their files are still the old ones.

A trainer that resumes, or that has one directory `latest`, replaces file after file. In between the directory holds all
tensors, of two states. So every directory has a *generation*. Another one begins when a file changes that belongs to
this one, and what the directory held then is *left over* until it is replaced or gone. A checkpoint with files left
over is not complete. A directory that is a version begins with the files of that version.

Nothing left over is no proof: between two scans, or while no publisher ran, the directory may have been written more
than once, the last time in part. So something written last must be the newest: the marker (`--marker`), or the index,
or the `.metadata`; without any, the checkpoint is complete when many scans find it unchanged.

What remains unseen, and only a marker tells: a first checkpoint that was being rewritten when the publisher started,
and a writer that died between two files, whose successor writes all the other files before it begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dcr_daemon.publish.watch.file_identity import FileIdentity, is_digest, is_same_content
from dcr_daemon.publish.watch.published import PublishedFiles


@dataclass(slots=True)
class Generation:
    """What one directory holds.

    Attributes:
        files: complete files as the last scan found them, by name.
        before: what the directory held when the generation began; empty for the first one.
        doubtful: files that were there then and not known to be complete: of this generation, or of the one before.
        horizon: a file that is not newer is left over (mtime, ns): all that is known of a version of very many files.
        version: `files` are those of a version, to which none should be added.
        present: all files as the last scan found them, complete or not.
        unchanged_scans: how many timed scans in a row found them so.
        was_complete: whether the generation was found complete.
    """

    files: dict[str, FileIdentity] = field(default_factory=dict)
    before: dict[str, FileIdentity] = field(default_factory=dict)
    doubtful: dict[str, FileIdentity] = field(default_factory=dict)
    horizon: int = -1
    version: bool = False
    present: Mapping[str, FileIdentity] = field(default_factory=dict)
    unchanged_scans: int = 0
    was_complete: bool = False

    @classmethod
    def of_version(cls, identity: frozenset[FileIdentity]) -> Generation:
        summary = [file.mtime_ns for file in identity if is_digest(file)]
        files = {file.name: file for file in identity if not is_digest(file)}
        return cls(files, before=files if summary else {}, horizon=max(summary, default=-1), version=bool(files))

    def update(self, present: Mapping[str, FileIdentity], complete: Collection[str], *, timed: bool) -> None:
        """Another scan found the files `present`, of which some are complete."""
        # One that is neither the first, nor was seen half-way or complete, began unseen: its files are of two states,
        # and those that change now may belong to the later one already.
        whole_states = self.is_first or self.was_complete or bool(self.left_over)
        self.unchanged_scans = timed + (self.unchanged_scans if present == self.present else 0)
        self.present = present
        inodes = {(file.inode, file.size, file.mtime_ns) for file in present.values()}
        changed = [
            name
            for name, file in self.files.items()
            if not is_same_content(file, present.get(name))
            and (name in present or (file.inode, file.size, file.mtime_ns) not in inodes)  # renamed is not changed
        ]
        added = self.version and not present.keys() <= self.files.keys()
        if added or (whole_states and any(self._belongs(name) for name in changed)):
            self.before, self.was_complete = dict(self.files), False
            self.doubtful = {name: file for name, file in present.items() if name not in self.files}
        self.version = self.version and not changed and not added
        kept = {name for name in self.files if is_same_content(self.files[name], present.get(name))}
        self.files = {name: present[name] for name in sorted(kept.union(complete)) if name in present}

    @property
    def is_first(self) -> bool:
        """Whether the directory held nothing before, as far as anybody knows."""
        return not self.before and self.horizon < 0

    @property
    def left_over(self) -> set[str]:
        """Names of the files that are to be replaced, or to go, before the checkpoint is complete."""
        return {name for name, file in self.present.items() if self._precedes(name, file)}

    def _belongs(self, name: str) -> bool:
        """Whether a file was written, or found, in this generation."""
        file = self.files[name]
        return not self._precedes(name, file) and not is_same_content(self.doubtful.get(name), file)

    def _precedes(self, name: str, file: FileIdentity) -> bool:
        """Whether the file was there before the generation began."""
        return is_same_content(self.before.get(name), file) or file.mtime_ns <= self.horizon


class Rewrites:
    """Remembers the generation of every directory, by its path below the watched one."""

    def __init__(self, published: PublishedFiles) -> None:
        self._published = published
        self._generations: dict[str, Generation] = {}

    def update(
        self, relative: str, present: Mapping[str, FileIdentity], *, complete: Collection[str], timed: bool
    ) -> Generation | None:
        """The generation of a directory after another scan; None if it is the first one that it holds.

        Args:
            present: all files that the checkpoint needs, by name.
            complete: names of those that are completely written.
            timed: the scan counts for `unchanged_scans`.
        """
        if relative not in self._generations:
            self._generations[relative] = Generation.of_version(self._published.newest_at(relative))
        generation = self._generations[relative]
        generation.update(present, complete, timed=timed)
        return None if generation.is_first else generation

    def forget(self, relative: str) -> None:
        """The directory holds exactly a version: begin with that version at the next change."""
        self._generations.pop(relative, None)

    def forget_except(self, seen: Collection[str]) -> None:
        """Forget directories that the last scan did not meet."""
        self._generations = {name: known for name, known in self._generations.items() if name in seen}
