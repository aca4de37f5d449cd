"""A made-up run with all kinds of events, as lines of event logs: the reference for folds, audit, report and live
board.

Three founders; delta joins by pulling from three donors; bravo is killed during an all-reduce (the slot is redone);
charlie is frozen, put out, wakes and joins again; alpha leaves; validation gathers; several epochs; a closing slot.
Times are exact, so tests can compare numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_lightning.protocol.types import GENESIS

T0 = 1_700_000_000.0
Line = dict[str, Any]


@dataclass
class Script:
    """Writer of a run's event logs, slot by slot; `lines[source]` are the lines of each file."""

    quota: int = 8
    length: int = 640
    step_s: float = 0.1
    lines: dict[str, list[Line]] = field(default_factory=dict)
    now: float = T0
    seq: int = 0
    step: int = 0
    epoch: int = 0
    used: int = 0
    head: str = GENESIS.hash
    number: int = 0
    members: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    noise: int = 0
    pid: int = 1

    # ------------------------------------------------------------------ lines

    def say(self, who: str, name: str, *, at: float | None = None, file: str = "", **fields: Any) -> Line:
        """Writes one line of member `who`; with "" one of a scheduler or a harness, whose `file` is given."""
        t = self.now if at is None else at
        line: Line = {"t": round(t, 6), "mono": round(t - T0 + 1000, 6), "member": who}
        if who:
            line["node"] = who.rpartition("~")[0]
        line |= {"name": name, **fields}
        self.lines.setdefault(file or self.sources[who], []).append(line)
        return line

    def process(self, node: str, source: str = "", role: str = "member") -> str:
        source = source or f"{role}-{node}-{self.pid}.jsonl"
        self.lines[source] = []
        self.say("", "opened", file=source, node=node, pid=self.pid, host="box", role=role)
        return source

    def welcome(self, member: str, source: str, role: str) -> None:
        self.sources[member] = source
        self.say(member, "welcomed", id=member, role=role, reason="there is room")

    def jitter(self) -> float:
        """Returns a reproducible variation of a step's time, in seconds."""
        self.noise = (self.noise * 1103515245 + 12345) % (1 << 31)
        return 0.012 * (self.noise / (1 << 31)) * (1 + 5 * (self.noise % 37 == 0))

    # ------------------------------------------------------------------ views and slots

    def view(self, members: list[str], reason: str, joiners: tuple[str, ...] = ()) -> None:
        self.members = list(members)
        self.number += 1
        self.say(
            "",
            "decide",
            file=f"scheduler-s-{self.pid}.jsonl",
            id=self.view_id,
            members=members,
            base=self.head,
            hand_on=False,
            reason=reason,
        )
        for i, member in enumerate(members):
            self.say(
                member,
                "view",
                at=self.now + 0.002 + 0.0005 * i,
                id=self.view_id,
                members=list(members),
                joiners=list(joiners),
                reason=reason,
                chain="c0",
            )

    @property
    def view_id(self) -> str:
        return f"1.{self.number}"

    def header(self, *extra: object) -> str:
        return hashlib.blake2b(
            repr((self.seq, self.view_id, self.members, self.head, extra)).encode(), digest_size=8
        ).hexdigest()

    def state(self, head: str) -> str:
        return hashlib.blake2b(f"state {head}".encode(), digest_size=8).hexdigest()

    def slot(
        self, kind: str = "step", *, only: list[str] | None = None, hashes: bool = False, took: float = 0.0
    ) -> str:
        """Writes that all members (or only those in `only`) commit a slot, `took` seconds after the last one."""
        self.now += took or (self.step_s + self.jitter() if kind == "step" else 0.02)
        self.seq += 1
        spent: dict[str, list[Line]] = {m: [] for m in self.members}
        weights = dict.fromkeys(self.members, 0.0)
        if kind == "step":
            self.step += 1
            if self.used >= self.length:
                self.epoch, self.used = self.epoch + 1, 0
            for member in self.members:
                take = min(self.quota, self.length - self.used)
                weights[member] = float(take)
                if take:
                    spent[member] = [{"stream": "", "epoch": self.epoch, "spans": [[self.used, self.used + take]]}]
                self.used += take
        new = self.header(kind, only)
        ledger = [{"stream": "", "epoch": self.epoch, "spans": [[0, self.used]]}] if self.used else []
        for i, member in enumerate(self.members if only is None else only):
            self.say(
                member,
                "committed",
                at=self.now + 0.001 * i,
                seq=self.seq,
                kind=kind,
                step=self.step,
                view=self.view_id,
                header=new,
                prev=self.head,
                contributors=[[m, weights[m]] for m in self.members],
                spent=spent[member],
                ledger=ledger,
                next_view=self.view_id,
                duration_s=self.step_s,
                wait_s=0.03,
            )
            if hashes:
                self.hashed(member, new, at=self.now + 0.001 * i)
        self.head = new
        return new

    def hashed(self, member: str, head: str, *, at: float | None = None) -> None:
        """Writes the hash of the member's state after the slot with this header."""
        self.say(member, "state_hash", at=at, seq=self.seq, step=self.step, head=head, hash=self.state(head))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.slot(hashes=(self.step + 1) % 10 == 0)

    # ------------------------------------------------------------------ happenings

    def found(self, nodes: list[str]) -> None:
        self.process("s", role="scheduler")
        members = []
        for node in nodes:
            source = self.process(node)
            self.now += 0.2
            self.welcome(f"{node}~1", source, "founder")
            members.append(f"{node}~1")
        self.now += 0.3
        self.view(members, "founding")
        for member in members:
            self.say(member, "joined", role="founder", seq=0, step=0, view=self.view_id, head=self.head)
            self.say(member, "epoch", stream="", epoch=0, length=self.length)
            self.say(member, "epoch", stream="", epoch=1, length=self.length)

    def join(self, node: str, *, incarnation: int = 1, mib: float = 48.0, source: str = "", pause: float = 0.35) -> str:
        """Writes that a newcomer joins: it is welcomed while the others train, then pulls the state from all members at
        a boundary; returns its id.
        """
        member = f"{node}~{incarnation}"
        source = source or self.process(node, f"member-{node}-{incarnation}.jsonl")
        self.now += 0.001
        self.welcome(member, source, "joiner")
        self.steps(6)
        old = list(self.members)
        self.slot("boundary", hashes=True)
        at_head, at_seq = self.head, self.seq
        for donor in old:
            self.say(donor, "published", seq=at_seq, head=at_head)
        self.view([*old, member], f"{node} joins", (member,))
        self.say(member, "pull_started", seq=at_seq, head=at_head, sources=old)
        total = int(mib * (1 << 20))
        parts = [0.5, 0.3, 0.2, 0.0, 0.0] if len(old) == 3 else [1 / len(old)] * len(old)
        for i in range(1, 5):
            self.say(
                member,
                "pull_progress",
                at=self.now + pause * i / 5,
                nbytes=total * i // 5,
                total=total,
                rate_bps=round(8 * total / pause),
                remaining_s=round(pause * (5 - i) / 5, 3),
                sources={d: int(total * i / 5 * p) for d, p in zip(old, parts, strict=False)},
            )
        for donor, part in zip(old, parts, strict=False):
            self.say(
                member,
                "pull_source",
                at=self.now + pause * 0.95,
                source=donor,
                nbytes=int(total * part),
                seconds=pause * 0.9,
            )
        self.now += pause
        self.say(
            member,
            "pull_done",
            nbytes=sum(int(total * p) for p, _ in zip(parts, old, strict=False)),
            skipped=2 << 20,
            seconds=pause * 0.95,
            hash=self.state(at_head),
        )
        self.say(member, "joined", role="joiner", seq=at_seq, step=self.step, view=self.view_id, head=at_head)
        self.slot(took=self.step_s)
        return member

    def kill(self, member: str, phase: str = "allreduce") -> None:
        """Writes that a member is killed by SIGKILL inside a slot that no member commits, so that the others redo it
        without this one.
        """
        self.now += 0.05
        self.say(member, "fault_injected", kind="sigkill", phase=phase, step=self.step)
        rest = [m for m in self.members if m != member]
        self.say(rest[0], "link_down", at=self.now + 0.004, peer=member, evidence="closed")
        self.say("", "suspect", at=self.now + 0.004, file=f"scheduler-s-{self.pid}.jsonl", evidence="closed")[
            "member"
        ] = member
        self.now += 0.009
        self.say("", "death", file=f"scheduler-s-{self.pid}.jsonl", evidence="control stream closed")["member"] = member
        self.now += 0.01
        self.view(rest, f"{member} died")
        for m in rest:
            self.say(m, "redo", view=self.view_id, base=self.seq, reason=f"{member} died")
        self.slot(took=0.05)

    def freeze(self, member: str, seconds: float) -> float:
        """Writes that the harness stops a member by SIGSTOP and that it is removed after 0.6 s. Returns when it
        continues.
        """
        node = member.rpartition("~")[0]
        if "harness-h-1.jsonl" not in self.lines:
            self.process("h", "harness-h-1.jsonl", role="harness")
        self.say("", "fault_injected", file="harness-h-1.jsonl", node=node, kind="sigstop", seconds=seconds)
        thaw = self.now + seconds
        rest = [m for m in self.members if m != member]
        self.now += 0.4
        self.say("", "suspect", file=f"scheduler-s-{self.pid}.jsonl", evidence="silent")["member"] = member
        self.now += 0.2
        self.say("", "death", file=f"scheduler-s-{self.pid}.jsonl", evidence="silent, confirmed by a neighbour")[
            "member"
        ] = member
        self.view(rest, f"{member} is silent")
        self.slot(took=0.07)
        return thaw

    def wake(self, member: str, thaw: float) -> None:
        self.now = max(self.now, thaw)
        self.say(member, "fenced", reason="excluded by a decided view", rejoin=True)
        self.say(member, "rejoin", old_id=member)

    def leave(self, member: str) -> None:
        self.say(member, "leave", reason="Ctrl+C")
        self.steps(1)
        rest = [m for m in self.members if m != member]
        self.view(rest, f"{member} leaves")
        self.say(member, "left", reason="Ctrl+C", at=self.now + 0.02)
        self.say(member, "closed", at=self.now + 0.03)

    def close(self) -> None:
        self.slot("closing", hashes=True)
        for member in self.members:
            self.say(member, "finished", seq=self.seq, step=self.step, at=self.now + 0.01)
            self.say(member, "closed", at=self.now + 0.02)

    def write(self, where: Path) -> Path:
        where.mkdir(parents=True, exist_ok=True)
        for source, lines in self.lines.items():
            ordered = sorted(lines, key=lambda line: line["t"])  # stable: equal times keep their order
            (where / source).write_text("".join(json.dumps(line) + "\n" for line in ordered))
        return where


def two_jobs(*, finished: bool = True) -> tuple[Script, Script]:
    """Returns two runs of one job with the same names in new processes: their member ids are equal, and their headers
    as long as both runs last.
    """
    first, second = Script(), Script(pid=2)
    first.found(["a", "b"])
    first.steps(12)
    if finished:
        first.close()
    second.now = first.now + 3.0
    second.found(["a", "b"])
    second.steps(5)
    return first, second


def story() -> Script:
    """Returns the whole made-up run."""
    run = Script()
    run.found(["alpha", "bravo", "charlie"])
    run.steps(20)
    run.join("delta")
    run.steps(12)
    run.slot("gather")
    run.slot("gather")
    run.kill("bravo~1")
    run.steps(25)
    thaw = run.freeze("charlie~1", 3.0)
    run.steps(24)
    run.wake("charlie~1", thaw)
    run.join("charlie", incarnation=2, source=run.sources["charlie~1"], mib=40)
    run.steps(10)
    run.leave("alpha~1")
    run.steps(14)
    run.close()
    return run
