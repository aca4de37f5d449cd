"""A simulated leader's store, and a follower's disk that forgets what was not synced."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.outer.messages import ShardFile
from chaos_lightning.outer.types import Entry, VersionId


@dataclass(slots=True)
class ChainStore:
    """The chain as it is durable; compares term and predecessor (O1)."""

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
        self.entries.append(entry)
        return ""


@dataclass(slots=True)
class Disk:
    """A follower's files: version to content. What was written and not synced is gone after a crash."""

    synced: dict[VersionId, str] = field(default_factory=dict)

    def whole(self) -> tuple[ShardFile, ...]:
        """What a follower finds when it starts."""
        return tuple(ShardFile(version, digest_of(content)) for version, content in sorted(self.synced.items()))


def digest_of(content: str) -> str:
    """Of a file with this content."""
    return f"#{content}"
