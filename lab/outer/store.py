"""Simulates a leader's store, and a follower's disk that forgets bytes that were not synced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from chaos_lightning.outer.rules.messages import ShardFile
from chaos_lightning.outer.rules.types import Entry, Summary, VersionId


@dataclass(slots=True)
class ChainStore:
    """Chain as it is durable; compares term and predecessor (O1). A summary takes the place of all before (O1a)."""

    term: int = 0
    entries: list[Entry] = field(default_factory=list)
    down: bool = False
    doubtful: bool = False
    """Whether each write is stored, and its answer is lost once."""

    def take_term(self) -> int:
        """Takes a term for a leader that begins: no older leader writes any more."""
        self.term += 1
        return self.term

    def append(self, entry: Entry) -> str:
        """Appends an entry; returns why it is refused, "" if it is durable now, or was before: the answer may have been
        lost.
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
        """Returns whether this entry is the last one that was stored."""
        return bool(self.entries) and self.entries[-1] == entry

    def go_back(self, entries: Sequence[Entry]) -> None:
        """Puts an older copy in the store's place, with these of all entries that it ever took; the last one's term
        rules.
        """
        sums = [at for at, entry in enumerate(entries) if isinstance(entry.body, Summary)]
        self.entries = [*entries[sums[-1] if sums else 0 :]]
        self.term = entries[-1].term if entries else 0


@dataclass(slots=True)
class _File:
    """File of one version: `digest` is of the written content, `content` is the present one."""

    content: str
    digest: str
    synced: bool = False


SAVING = ("write", "sync", "rename", "sync-folder", "report")
"""Steps in which a follower saves a file (O6), in order."""

Name = tuple[VersionId, str]
"""Name of a file: its version, and the digest if it was written beside one of other shards (O15), else ""."""


class Disk:
    """Disk of a follower with its files. After a crash all that was not synced may be gone: bytes, new names, and
    removals.

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
        """Runs one step of saving; another file's removal may have come between."""
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
        """Deletes a version's files, which are gone unless power is lost before the folder is synced."""
        self._files = {name: file for name, file in self._files.items() if name[0] != version}

    def delete_beyond(self, number: int) -> None:
        """Deletes all versions above this number, durably."""
        self._files = {name: file for name, file in self._files.items() if name[0].number <= number}
        self._sync_folder()

    def clear(self) -> None:
        """Deletes all files, which are gone unless power is lost before the folder is synced."""
        self._files = {}

    def lose_power(self, random: Random) -> None:
        """Loses some of the bytes and names that were not synced, by chance."""
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
        """Returns the file that is taken for the one with this digest."""
        return self._files.get((version, digest), self._files.get((version, "")))

    def read(self, version: VersionId, digest: str) -> str | None:
        """Returns the content of the file; None: there is no file."""
        file = self._at(version, digest)
        return None if file is None else file.content

    def safe(self, version: VersionId, digest: str) -> bool:
        """Returns whether the content written under this digest would be there if power were lost now."""

        def good(file: _File | None) -> bool:
            return file is not None and file.synced and file.digest == digest

        names = (version, digest), (version, "")  # with the same shard in both cuts both have what is looked for
        kept = any(good(self._files.get(name)) and good(self._kept.get(name)) for name in names)
        return kept and good(self._at(version, digest))

    def damage(self, version: VersionId, digest: str) -> None:
        """Damages a file by a bit that flips at rest; no process knows before it is read."""
        if (file := self._at(version, digest)) is not None:
            file.content += "?"

    def damaged(self, marks: Iterable[tuple[VersionId, str]]) -> bool:
        """Returns whether the files of all these marks are damaged."""
        files = [self._at(*mark) for mark in marks]
        return all(file is not None and digest_of(file.content) != file.digest for file in files)

    @property
    def newest(self) -> int:
        """Highest number of a version on the disk; 0: there is none."""
        return max((version.number for version, _ in self._files), default=0)

    def found(self) -> tuple[ShardFile, ...]:
        """Returns the files that a follower finds when it starts; it does not read all of them."""
        self._parts = {}
        if self._synced_first:
            self._sync_folder()
        return tuple(ShardFile(version, file.digest) for (version, _), file in sorted(self._files.items()))


def digest_of(content: str) -> str:
    """Returns the digest of a file with this content."""
    return f"#{content}"
