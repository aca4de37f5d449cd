"""Simulates the start of a whole server, which cuts the shards anew first if the followers changed (O15).

Theory of operation. What is done in which order is decided by outer/rules/recut_steps.py, as in a process; here it is
done to simulated disks and the store, a moment apart. The start may be killed before each step, and between the steps
of a save, and power may be lost then. Meanwhile no process of the server runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chaos_lightning.errors import ChaosError
from chaos_lightning.outer.rules import recut_steps as todo
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.types import Entry
from chaos_lightning.planning.fleet.kernel import Action, Process
from lab.outer.blocks import put_together
from lab.outer.processes import Job
from lab.outer.store import Disk, digest_of

_MOST_STEPS = 100
"""Number of steps before one of which, by chance, the start is killed, unless it is through earlier."""


class ServerStart(Process):
    """Simulated start of a whole server.

    Args:
        job: Job of the server.
        called: Prefix of followers' names and number of followers that are asked for, such as "f3"; "": none are.
        over: Function that is called once: with why it failed, or "".

    Attributes:
        names: Names of the followers that run from then on.
    """

    def __init__(self, job: Job, called: str, over: Callable[[str], None]) -> None:
        super().__init__(job.kernel, "server")
        self._job, self._over = job, over
        self._chain = self._read()
        asked = [f"{called[0]}{number}" for number in range(int(called[1:]))] if called else []
        self.names = asked or [*self._chain.cut] or ["f0"]
        self._steps: todo.Steps | None = None
        self._late: list[tuple[todo.Write, str, Sequence[str]]] = []
        """Remaining writes of files that were reported before they were safe: a planted bug."""
        self._left = self.kernel.random.randrange(_MOST_STEPS)
        self._soon(self._begin)

    def _read(self) -> OuterChain:
        chain = self._job.machines.chain()
        for entry in self._job.store.entries:
            chain.follow(entry)
        return chain

    def _soon(self, action: Action) -> None:
        self.timer(self.kernel.between(0.001, 0.01), lambda: self._alive(action))

    def _alive(self, action: Action) -> None:
        """Runs an action, unless the start is killed before it; checks afterwards that durable files are safe."""
        if self._left:
            self._left -= 1
            action()
            self._job.check_safe()
        else:
            self.kill()

    def kill(self) -> None:
        """Kills the starting server by SIGKILL; power may be lost, too."""
        if not self.alive:
            return
        if self.kernel.random.random() < 0.5:
            for disk in self._job.disks.values():
                disk.lose_power(self.kernel.random)
        self._end("it was killed")

    def _end(self, trouble: str) -> None:
        self.die()
        self._over(trouble)

    def _begin(self) -> None:
        """Decides whether shards must be cut anew, as outer/commands/server_main.py does, and begins that."""
        chain = self._chain
        if not chain.cut or chain.ended is not None:
            self._end("")
            return
        for name, disk in self._job.disks.items():
            if todo.needless(chain, name, disk.newest):
                disk.clear()
        if todo.must_recut(chain, self.names):
            self._steps = self._job.machines.recut("job", self.names)
            self._go_on(None)
        else:
            self._end("")

    def _go_on(self, came: Any) -> None:
        """Hands the result of a step to the procedure that cuts the shards anew, and begins the next step that it asks
        for.
        """
        assert self._steps is not None
        try:
            step = self._steps.send(came)
        except StopIteration:
            self._finish()
        except ChaosError as error:
            self._end(str(error))
        else:
            self._soon(lambda: self._do(step))

    def _do(self, step: todo.Step) -> None:
        store, disks = self._job.store, self._job.disks
        match step:
            case todo.ReadChain() | todo.StoreCut() if store.down:
                self._end("the store is down")
            case todo.ReadChain():
                store.take_term()
                self._chain = self._read()
                self._go_on(self._chain)
            case todo.Find(follower):
                self._go_on("" if follower in disks else follower)
            case todo.Check(source):
                self._go_on("" if self._content(source) is not None else "its digest is another one")
            case todo.Write():
                self._write(step)
            case todo.StoreCut(cut):
                self._record(self._chain.entry(store.term, cut))
            case todo.DeleteBeyond(follower, number):
                disks[follower].delete_beyond(number)
                self._go_on(None)

    def _record(self, entry: Entry) -> None:
        store = self._job.store
        refused = store.append(entry)
        if not refused:
            self._job.stored(entry)
        if store.doubtful:
            self._end("the store does not answer")
        else:
            self._go_on(refused)

    def _content(self, source: todo.OldShard) -> str | None:
        """Returns the content of an old shard's file; None if it is missing or damaged."""
        content = self._job.disks[source.follower].read(source.version, source.digest)
        return content if content is not None and digest_of(content) == source.digest else None

    def _write(self, write: todo.Write) -> None:
        found = [(source.shard, self._content(source)) for source in write.sources]
        whole = [(shard, content) for shard, content in found if content is not None]
        if len(whole) < len(found):
            self._end("a file was damaged meanwhile")
        else:
            self._job.disks.setdefault(write.follower, Disk(synced_first=self._job.machines.syncs_first))
            self._save(write, put_together(write.shard, whole), self._job.machines.cutting)

    def _save(self, write: todo.Write, content: str, steps: Sequence[str]) -> None:
        """Runs the remaining steps of saving a new shard's file."""
        machines, disk = self._job.machines, self._job.disks[write.follower]
        if steps and steps[0] == "report":
            if steps[1:]:
                self._late.append((write, content, steps[1:]))
            self._go_on(digest_of(content))
        elif not steps:
            self._finish()
        elif disk.full:
            self._end("the disk is full")
        else:
            disk.step(steps[0], write.version, content, beside=machines.beside)
            self._soon(lambda: self._save(write, content, steps[1:]))

    def _finish(self) -> None:
        if self._late:
            self._save(*self._late.pop(0))
        else:
            self._end("")
