"""A simulated leader's store, and a follower's disk that forgets what was not synced."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.outer.messages import ShardFile
from chaos_lightning.outer.types import Entry, Summary, VersionId


@dataclass(slots=True)
class ChainStore:
    """The chain as it is durable; compares term and predecessor (O1). A summary takes the place of all before (O1a)."""

    term: int = 0
    entries: list[Entry] = field(default_factory=list)
    down: bool = False

    def take_term(self) -> int:
        """A leader begins: no older one writes any more."""
        self.term += 1
        return self.term

    def append(self, entry: Entry) -> str:
        """Why it is refused; "" if it is durable now."""
        if entry.term != self.term:
            return f"term {entry.term} is over, {self.term} rules"
        last = self.entries[-1].hash if self.entries else ""
        if entry.before != last:
            return "another entry is there"
        if isinstance(entry.body, Summary):
            self.entries.clear()
        self.entries.append(entry)
        return ""


@dataclass(slots=True)
class Disk:
    """A follower's files: version to content. What was written and not synced is gone after a crash.

    Attributes:
        synced: What lies there.
        digests: What lay there when it was read back.
        full: Nothing can be written.
    """

    synced: dict[VersionId, str] = field(default_factory=dict)
    digests: dict[VersionId, str] = field(default_factory=dict)
    full: bool = False

    def write(self, version: VersionId, content: str) -> None:
        """Written, synced, renamed."""
        self.synced[version], self.digests[version] = content, digest_of(content)

    def delete(self, version: VersionId) -> None:
        """Gone for good."""
        self.synced.pop(version, None)
        self.digests.pop(version, None)

    def damage(self, version: VersionId) -> None:
        """A bit flips at rest; nobody knows before it is read."""
        if version in self.synced:
            self.synced[version] += "?"

    @property
    def damaged(self) -> set[VersionId]:
        """Files that are not what they were."""
        return {version for version, content in self.synced.items() if digest_of(content) != self.digests[version]}

    def found(self) -> tuple[ShardFile, ...]:
        """What a follower finds when it starts; it does not read all of it."""
        return tuple(ShardFile(version, digest) for version, digest in sorted(self.digests.items()))


def digest_of(content: str) -> str:
    """Of a file with this content."""
    return f"#{content}"
