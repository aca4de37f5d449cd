"""A simulated leader's store, and a follower's disk that forgets what was not synced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from chaos_lightning.outer.messages import ShardFile
from chaos_lightning.outer.types import Entry, Summary, VersionId


@dataclass(slots=True)
class ChainStore:
    """The chain as it is durable; compares term and predecessor (O1). A summary takes the place of all before (O1a)."""

    term: int = 0
    entries: list[Entry] = field(default_factory=list)
    down: bool = False
    doubtful: bool = False
    """Each write is stored, and its answer is lost once."""

    def take_term(self) -> int:
        """A leader begins: no older one writes any more."""
        self.term += 1
        return self.term

    def append(self, entry: Entry) -> str:
        """Why it is refused; "" if it is durable now, or was before: the answer may have been lost."""
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
        """Whether it is the last one that was stored."""
        return bool(self.entries) and self.entries[-1] == entry

    def go_back(self, entries: Sequence[Entry]) -> None:
        """Somebody puts an older copy in its place, with these of all that it ever took; the last one's term rules."""
        sums = [at for at, entry in enumerate(entries) if isinstance(entry.body, Summary)]
        self.entries = [*entries[sums[-1] if sums else 0 :]]
        self.term = entries[-1].term if entries else 0


@dataclass(slots=True)
class _File:
    """Of one version: `digest` is of what was written, `content` is what lies there."""

    content: str
    digest: str
    synced: bool = False
    named: bool = False
    kept: bool = False
    """Its name is in the folder as that is on disk."""


SAVING = ("write", "sync", "rename", "sync-folder", "report")
"""In this order a follower saves a file (O6)."""


class Disk:
    """A follower's files. What was not synced may be gone after a crash: bytes, new names, and removals.

    Args:
        synced_first: A follower that starts syncs its folder before it tells what lies there.

    Attributes:
        full: Nothing can be written.
    """

    def __init__(self, *, synced_first: bool = True) -> None:
        self.full, self._synced_first = False, synced_first
        self._files: dict[VersionId, _File] = {}
        self._removed: dict[VersionId, _File] = {}
        """Since the folder was synced."""

    def step(self, what: str, version: VersionId, content: str) -> None:
        """One step of saving; another one's removal may have come between."""
        if what == "write":
            self._files[version] = _File(content, digest_of(content))
        elif (file := self._files.get(version)) is not None:
            file.synced |= what == "sync"
            file.named |= what == "rename"
        if what == "sync-folder":
            self._sync_folder()

    def _sync_folder(self) -> None:
        self._removed.clear()
        for each in self._files.values():
            each.kept |= each.named

    def write(self, version: VersionId, content: str) -> None:
        """All steps."""
        for what in SAVING:
            self.step(what, version, content)

    def delete(self, version: VersionId) -> None:
        """Gone, unless power is lost before the folder is synced."""
        file = self._files.pop(version, None)
        if file is not None and file.kept:
            self._removed[version] = file

    def lose_power(self, random: Random) -> None:
        """What was not synced is there or not, as it happens."""
        back = {version: file for version, file in self._removed.items() if random.random() < 0.5}
        files = {version: file for version, file in self._files.items() if file.kept or random.random() < 0.5}
        self._files, self._removed = {**back, **files}, {}
        for file in self._files.values():
            file.kept = file.named
            if not file.synced:
                file.content, file.synced = f"{file.content}?", True

    def read(self, version: VersionId) -> str | None:
        """What lies there; None: nothing does."""
        file = self._files.get(version)
        return file.content if file is not None and file.named else None

    def whole(self, version: VersionId) -> bool:
        """Whether its file is there, and is what it was."""
        file = self._files.get(version)
        return file is not None and file.named and digest_of(file.content) == file.digest

    def safe(self, version: VersionId, digest: str) -> bool:
        """Whether power could be lost now, and what was written under this digest would be there."""
        file = self._files.get(version)
        return file is not None and file.kept and file.synced and file.digest == digest

    def damage(self, version: VersionId) -> None:
        """A bit flips at rest; nobody knows before it is read."""
        if version in self._files:
            self._files[version].content += "?"

    def damaged(self, versions: Iterable[VersionId]) -> bool:
        """Whether the files of all of these are not what they were."""
        files = [self._files.get(version) for version in versions]
        return all(file is not None and digest_of(file.content) != file.digest for file in files)

    def found(self) -> tuple[ShardFile, ...]:
        """What a follower finds when it starts; it does not read all of it."""
        self._files = {version: file for version, file in self._files.items() if file.named}
        if self._synced_first:
            self._sync_folder()
        return tuple(ShardFile(version, file.digest) for version, file in sorted(self._files.items()))


def digest_of(content: str) -> str:
    """Of a file with this content."""
    return f"#{content}"
