"""Simulates a leader's store, and a follower's disk, which may lose bytes that were not synced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from chaos_lightning.outer.rules.messages import ShardFile
from chaos_lightning.outer.rules.types import Entry, Summary, VersionId


@dataclass(slots=True)
class ChainStore:
    """Durable chain; refuses entries of an old term or with a wrong predecessor (O1), and a summary replaces all before
    it (O1a).
    """

    term: int = 0
    entries: list[Entry] = field(default_factory=list)
    down: bool = False
    doubtful: bool = False
    """Whether each write is stored, and its answer is lost once."""

    def take_term(self) -> int:
        """Returns a new term for a leader that begins; from then on older leaders cannot write."""
        self.term += 1
        return self.term

    def append(self, entry: Entry) -> str:
        """Appends an entry; returns why it is refused, or "" if it is durable, also if an earlier write of it had
        succeeded.
        """
        if entry.term != self.term:
            return f"term {entry.term} is over, {self.term} rules"
        if self.holds(entry):
            return ""
        last = self.entries[-1].hash if self.entries else ""
        if entry.before != last:
            return "another entry is there"
        if isinstance(entry.body, Summary):
            self.entries.clear()
        self.entries.append(entry)
        return ""

    def holds(self, entry: Entry) -> bool:
        """Returns whether an entry is the last one stored."""
        return bool(self.entries) and self.entries[-1] == entry

    def go_back(self, entries: Sequence[Entry]) -> None:
        """Replaces the store's content by an older copy with these entries, and its term by the last entry's."""
        sums = [at for at, entry in enumerate(entries) if isinstance(entry.body, Summary)]
        self.entries = [*entries[sums[-1] if sums else 0 :]]
        self.term = entries[-1].term if entries else 0


@dataclass(slots=True)
class _File:
    """File of one version: `digest` is of the content as written, `content` is what it holds now."""

    content: str
    digest: str
    synced: bool = False


SAVING = ("write", "sync", "rename", "sync-folder", "report")
"""Steps in which a follower saves a file (O6), in order."""

Name = tuple[VersionId, str]
"""Name of a file: its version, and the digest if it was written beside one of other shards (O15), else ""."""


class Disk:
    """Simulated disk of a follower: after a power loss, bytes, new names and removals that were not synced may be gone.

    Args:
        synced_first: Whether a follower that starts syncs its folder before it tells what lies there.

    Attributes:
        full: Whether nothing can be written.
        staged: Staged bytes that outlive a follower, by what they are told apart: a planted bug.
    """

    def __init__(self, *, synced_first: bool = True) -> None:
        self.full, self._synced_first = False, synced_first
        self.staged: dict[tuple[object, ...], str] = {}
        self._parts: dict[Name, _File] = {}
        """Files that have no name yet."""
        self._files: dict[Name, _File] = {}
        self._kept: dict[Name, _File] = {}
        """Files in the folder as it was when it was synced."""

    def step(self, what: str, version: VersionId, content: str, *, beside: bool = False) -> None:
        """Runs one step of saving a file, which may have been removed between two steps."""
        name = version, digest_of(content) if beside else ""
        if what == "write":
            self._parts[name] = _File(content, digest_of(content))
        elif what == "sync" and (file := self._parts.get(name, self._files.get(name))) is not None:
            file.synced = True
        elif what == "rename" and name in self._parts:
            self._files[name] = self._parts.pop(name)
        elif what == "sync-folder":
            self._sync_folder()

    def _sync_folder(self) -> None:
        self._kept = dict(self._files)

    def delete(self, version: VersionId) -> None:
        """Deletes a version's files; a power loss before the next sync of the folder may bring them back."""
        self._files = {name: file for name, file in self._files.items() if name[0] != version}

    def delete_beyond(self, number: int) -> None:
        """Deletes all versions above a number, durably."""
        self._files = {name: file for name, file in self._files.items() if name[0].number <= number}
        self._sync_folder()

    def clear(self) -> None:
        """Deletes all files; a power loss before the next sync of the folder may bring them back."""
        self._files = {}

    def lose_power(self, random: Random) -> None:
        """Simulates a power loss: bytes and names that were not synced are lost at random."""
        files = {}
        for name in sorted({*self._files, *self._kept}):
            now, kept = self._files.get(name), self._kept.get(name)
            file = now if now is kept or random.random() < 0.5 else kept
            if file is not None:
                files[name] = file
                if not file.synced:
                    file.content, file.synced = f"{file.content}?", True
        self._parts, self._files, self._kept = {}, files, dict(files)

    def _at(self, version: VersionId, digest: str) -> _File | None:
        """Returns the file that a reader of this version and digest would open."""
        return self._files.get((version, digest), self._files.get((version, "")))

    def read(self, version: VersionId, digest: str) -> str | None:
        """Returns a file's content; None if there is no file."""
        file = self._at(version, digest)
        return None if file is None else file.content

    def safe(self, version: VersionId, digest: str) -> bool:
        """Returns whether a version's file with this digest would survive a power loss now."""

        def good(file: _File | None) -> bool:
            return file is not None and file.synced and file.digest == digest

        names = (version, digest), (version, "")  # with the same shard in both cuts both have what is looked for
        kept = any(good(self._files.get(name)) and good(self._kept.get(name)) for name in names)
        return kept and good(self._at(version, digest))

    def damage(self, version: VersionId, digest: str) -> None:
        """Flips a bit of a file at rest; no process notices before it reads the file."""
        if (file := self._at(version, digest)) is not None:
            file.content += "?"

    def damaged(self, marks: Iterable[tuple[VersionId, str]]) -> bool:
        """Returns whether all of the files with these versions and digests are damaged."""
        files = [self._at(*mark) for mark in marks]
        return all(file is not None and digest_of(file.content) != file.digest for file in files)

    @property
    def newest(self) -> int:
        """Highest version number on the disk; 0 if it is empty."""
        return max((version.number for version, _ in self._files), default=0)

    def found(self) -> tuple[ShardFile, ...]:
        """Returns the files that a follower lists when it starts, without reading their content."""
        self._parts = {}
        if self._synced_first:
            self._sync_folder()
        return tuple(ShardFile(version, file.digest) for (version, _), file in sorted(self._files.items()))


def digest_of(content: str) -> str:
    """Returns the digest of a file with this content."""
    return f"#{content}"
