"""Moves state and reduced bytes between members over authenticated bulk connections, for the engine."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from chaos_lightning.collectives.layout import Layout
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import ChaosError, DeadlineError, NoDonorError, StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.console import Teller
from chaos_lightning.machine.process_table import host_identity
from chaos_lightning.member.choice import TransferChoice, endpoint, endpoints
from chaos_lightning.member.connection_pool import ConnectionPool
from chaos_lightning.member.keyring import Keyring
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.telling import ProgressLines, fetched_line
from chaos_lightning.membership.donors import copiers, groups
from chaos_lightning.protocol.types import Header, Member, Progress, Span, View
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.bulk import BulkSocket
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.policy import PolicyOptions
from chaos_lightning.replication.pull import PullReport, pull_result, pull_state
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.snapshot import Snapshot
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.replication.state_reader import StateReader
from chaos_lightning.replication.table import StateTable
from chaos_lightning.security.credentials import Credentials, Secret
from chaos_lightning.transport.handshake import Greeting, dial
from chaos_lightning.transport.links import Links

_log = logging.getLogger("chaos_lightning")
Sources = tuple[tuple[Member, tuple[Span, ...]], ...]
HAND_ON_DEADLINE_S = 30.0
TOLD_EVERY_S = 1.0
ESTIMATES_TIMEOUT_S = 3.0
DECISION_S = 1.0
"""Seconds after the last donor was lost within which the scheduler's decision about dead donors may come."""
POOLED_CONNECTIONS = 2
"""Number of connections to each neighbour of a newcomer: one for the state, one for the log."""


class _Watched:
    """Wrapper of a training state that calls a function when a pull begins to overwrite it."""

    def __init__(self, state: StateAccess, begun: Callable[[], None]) -> None:
        self._state = state
        self._begun = begun

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self._state.tensors()

    def manifest(self) -> dict[str, object]:
        return self._state.manifest()

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        self._begun()
        self._state.prepare(manifest, table)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        self._state.adopt(manifest)


class Transfer:
    """Transfers of one member, in both directions.

    Args:
        job: Job name, checked in every handshake.
        token: Cluster token (empty for none), or credentials.
        mail: Mailbox with the scheduler's decisions about this member.
        events: This member's event log.
        choice: Choice of the policy that pulls a state.
        links: Links to other members, with measured rates.
        keys: Keyring that protects connections.
        tell: Sends a control message (any thread).
    """

    def __init__(
        self,
        job: str,
        token: Secret,
        mail: Mailbox,
        events: EventLog,
        choice: TransferChoice,
        links: Links,
        keys: Keyring,
        tell: Callable[[Progress], None],
    ) -> None:
        self.server = StateServer()
        self.teller, self._progress_lines = Teller(), ProgressLines()
        self.report: PullReport | None = None
        self.mixed = ""
        """Text on the pull that has begun to write over this member's own state; cleared once the member is in a view
        with the whole state.
        """
        self._links = links
        self._keys = keys
        self._tell = tell
        self._pool = ConnectionPool(self._connect)
        self._observed = False
        """Whether the last state that was pulled was a learner's."""
        self._copying: Snapshot | None = None
        self._choice = choice
        self._job = job
        self._secret = Credentials.of(token)
        self._mail = mail
        self._events = events

    def ways(self, sources: Sequence[Member], view: View) -> list[Endpoint]:
        """Chooses which of the given members to ask for bytes, and returns their addresses, with routes (see
        choice.py).
        """
        return endpoints(sources, view, self._links.near())

    def dial(self, donor: Endpoint) -> socket.socket:
        """Returns an authenticated bulk connection, taken from the pool if possible."""
        return self._pool.take(donor) or self._connect(donor)

    def expect(self, donor: Member) -> None:
        """Opens connections in advance to a member that this newcomer may soon ask for its state."""
        self._pool.prepare(Endpoint(donor.id, donor.address, donor.port), POOLED_CONNECTIONS)

    def arrived(self) -> None:
        """Closes connections that were opened in advance, because this member is in the job or has another id now."""
        before, self._pool = self._pool, ConnectionPool(self._connect)
        before.close()

    def forget(self) -> None:
        """Forgets keys and withdrawn slots, because this member joins again under another id."""
        self._keys.reset()
        self.server.forget()

    def close(self) -> None:
        """Stops serving anything."""
        self._pool.close()
        self.server.close()
        self.teller.close()

    def tell_progress(self, now: Progress) -> None:
        """Shows on the console how far the transfer of the state is, every few seconds."""
        self.teller.tell(*self._progress_lines.due(now))

    def _connect(self, donor: Endpoint) -> socket.socket:
        greeting = Greeting(self._job, self._mail.who(), donor.member, "bulk")
        return dial(donor.address, donor.port, greeting, token=self._secret.tokens(), keys=self._keys)

    def publish(self, header: Header, state: StateAccess, layout: Layout) -> None:
        """Begins to serve the state at `header`, until the next slot commits (protocol.md 15).

        Nothing is copied but the buffers that the next forward pass changes: all else is still until that commit.
        """
        tensors = state.tensors()
        changing = {id(layout.slots[i].tensor) for i in layout.buffer_slots}
        copies = {name for name, tensor in tensors if id(tensor) in changing}
        self.server.publish(header.hash, header.seq, tensors, state.manifest(), copies=copies)
        self._events.emit("published", seq=header.seq, head=header.hash)

    def snapshot(self, header: Header, view: View | None, state: StateAccess, layout: Layout) -> None:
        """Begins a copy of the state at `header` for learners, made while training continues (protocol.md 15).

        Args:
            header: A committed one; the optimizer has stepped on it, and not on a later one.
            view: Its members on this machine all make such a copy now.
            state: The training state.
            layout: Its buffer slots are what a forward pass changes.
        """
        sharers = copiers(view, host_identity(), len(header.learners)) if view is not None else 1
        tensors = state.tensors()
        changing = {id(layout.slots[i].tensor) for i in layout.buffer_slots}
        volatile = {name for name, tensor in tensors if id(tensor) in changing}
        try:
            self._copying = self.server.snapshot(
                header.hash,
                header.seq,
                tensors,
                state.manifest(),
                volatile=volatile,
                sharers=sharers,
                learners=header.learners,
            )
        except StateError as error:  # others may have more memory; if nobody has, the newcomer comes in by a pause
            self._events.emit("error", what="snapshot", reason=str(error))
            return
        self._events.emit("snapshot", seq=header.seq, head=header.hash, nbytes=self._copying.nbytes)

    def settle(self) -> None:
        """Waits for a snapshot that is still being copied, before the optimizer writes to the state."""
        if self._copying is not None:
            self._copying.settle()
            self._copying = None

    def fetch(
        self,
        header: Header,
        view: View,
        state: StateAccess,
        deadline: float,
        superseded: Callable[[], bool] | None = None,
    ) -> bool:
        """Pulls the state at `header`; returns False if the scheduler has decided something else before it is complete.

        Args:
            header: Header of a committed slot.
            view: View that determines the donors (membership/donors.py).
            state: State that the bytes are written to.
            deadline: Time by `time.monotonic()`, s.
            superseded: Whether a learner's pull has become pointless: then it may be read out of a member's memory,
                unproved. None: it lets this member in; a newer pull, or this member's end, make it pointless.

        Raises:
            StateError: No donor is left, or the state does not fit.
        """
        given_up, proves = superseded or self._superseded, superseded is None and self._observed
        patient = self._choice.policy.patient
        found = groups(view, self._mail.who(), self._links.near(), fellows=not patient)
        if patient and not proves:  # there is nothing to share out, as a rule, and all wait
            self._await_estimates({source.id for source in found[0]}, deadline, given_up)
        for left, sources in zip(range(len(found) - 1, -1, -1), found, strict=True):
            try:
                report = self._pull(sources, header, view, state, deadline, superseded, proves=proves)
                break
            except (StateError, DeadlineError) as error:
                self._events.emit("error", what="pull", reason=str(error))
                none_left = isinstance(error, NoDonorError)
                if given_up() or (none_left and not left and self._await(given_up, DECISION_S)):
                    return False
                if not (none_left and left):
                    raise
        self._observed = superseded is not None
        self._pulled(report, header)
        if not proves:
            self.teller.tell(fetched_line(report.by_source, report.skipped, report.seconds))
        return True

    def _pull(
        self,
        sources: Sequence[Member],
        header: Header,
        view: View,
        state: StateAccess,
        deadline: float,
        superseded: Callable[[], bool] | None,
        *,
        proves: bool,
    ) -> PullReport:
        """Pulls the state once, for `fetch`, from these sources."""
        near, watched = self._links.near(), self._watched(header, state)
        donors, joiners = endpoints(sources, view, near), frozenset(view.joiners)
        config = PullConfig(deadline_s=max(0.1, deadline - time.monotonic()), by_reference=True)
        self._events.emit("pull_started", seq=header.seq, head=header.hash, sources=[m.id for m in sources])
        report = None
        if superseded is not None:
            report = self._read(donors, header, watched, config, superseded)
        options = PolicyOptions(
            ingress_bps=self._choice.ingress_bps,
            layer_nbytes=tuple(tensor.nbytes for _, tensor in state.tensors()),
            newcomer=self._mail.who(),
            sources=sources,
            near=near,
            view=view,
        )
        return report or pull_state(
            donors,
            self.dial,
            head=header.hash,
            seq=header.seq,
            state=watched,
            config=config,
            policy=self._choice.policy(self._links.estimates(), options),
            progress=self._progress("prove" if superseded is None else "pull"),
            abandoned=superseded or self._superseded,
            replayed=proves,
            loading=joiners,
            grew=self.server.grew,
        )

    def _await_estimates(self, sources: set[str], deadline: float, given_up: Callable[[], bool]) -> None:
        """Waits until a newcomer's new links to these sources are measured, for a policy that does not correct its plan
        later.
        """
        timeout_s = min(deadline - time.monotonic(), ESTIMATES_TIMEOUT_S)
        self._await(lambda: given_up() or not sources & self._links.unmeasured(), timeout_s)

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until the condition holds, at most `timeout_s`; returns whether it does."""
        until = time.monotonic() + timeout_s
        with self._mail.changed:
            while not condition() and time.monotonic() < until:
                self._mail.changed.wait(0.02)
            return condition()

    def _read(
        self,
        donors: Sequence[Endpoint],
        header: Header,
        state: StateAccess,
        config: PullConfig,
        superseded: Callable[[], bool],
    ) -> PullReport | None:
        """Reads a snapshot out of the memory of a member on this machine; returns None if no member lends its
        memory.
        """
        ways, pool = {e.member: e for e in donors}, self._pool

        def keep(member: str, channel: BulkSocket) -> None:
            pool.put(ways[member], channel.sock)

        reader = StateReader(
            donors,
            self.dial,
            state,
            head=header.hash,
            seq=header.seq,
            config=config,
            abandoned=superseded,
            keep=keep,
        )
        return reader.run()

    def _watched(self, header: Header, state: StateAccess) -> StateAccess:
        def begun() -> None:
            self.mixed = f"step {header.step}"

        return _Watched(state, begun)

    def _pulled(self, report: PullReport, header: Header) -> None:
        self.report = report
        for source, did in report.sources.items():
            self._events.emit(
                "pull_source",
                source=source,
                nbytes=did.nbytes,
                seconds=round(did.busy_s, 4),
                rate_bps=round(did.rate_bps),
                stolen=did.stolen,
                duplicated=did.duplicated,
            )
        self._events.emit(
            "pull_done",
            nbytes=sum(report.by_source.values()),
            skipped=report.skipped,
            seconds=round(report.seconds, 4),
            policy=report.reason,
            hash=report.state_hash,
            observed=not report.state_hash,
            seq=header.seq,
            step=header.step,
        )

    def _progress(self, phase: str) -> Callable[[Progress], None]:
        """Returns a function that reports a pull's progress to log and scheduler, about once a second."""
        told = time.monotonic()

        def tell(now: Progress) -> None:
            nonlocal told
            self.server.grew()
            if time.monotonic() - told < TOLD_EVERY_S:
                return
            told = time.monotonic()
            self._events.emit(
                "pull_progress",
                nbytes=now.done_nbytes,
                total=now.total_nbytes,
                rate_bps=round(now.rate_bps),
                remaining_s=round(min(now.remaining_s, 1e9), 1),
                sources={s.member: s.nbytes for s in now.sources},
            )
            self._tell(replace(now, phase=phase))
            self.tell_progress(now)

        return tell

    def _superseded(self) -> bool:
        """Returns whether a newer decision, or this member's end, has made the present pull pointless."""
        return self._mail.pull is not None or self._mail.over

    def hand_on(
        self,
        header: Header,
        view: View,
        sources: Sources,
        wanted: tuple[Span, ...],
        memory: Memory,
        done: Callable[[], None],
    ) -> None:
        """Fetches a handed-on slot's reduced bytes in a separate thread, then calls `done` (protocol.md 9).

        Args:
            header: The slot's header.
            view: The present view.
            sources: Members with the bytes that each holds; no spans means all that the step reduced.
            wanted: Byte ranges that the step reduced.
            memory: Memory whose result buffer for the slot takes the bytes, verbatim.
            done: Called in the fetching thread.
        """

        def work() -> None:
            try:
                pull_result(
                    [endpoint(m, view, self._links.near()) for m, _ in sources],
                    self.dial,
                    head=header.hash,
                    seq=header.seq,
                    memory=memory.results[header.seq % 2],
                    spans={m.id: spans or wanted for m, spans in sources},
                    wanted=wanted,
                    config=PullConfig(deadline_s=HAND_ON_DEADLINE_S),
                )
            except (ChaosError, OSError) as error:
                # The source died too: the next decision names another one or has the step reduced again.
                self._events.emit("error", what="hand-on", reason=str(error))
                return
            done()

        threading.Thread(target=work, name="chaos-hand-on", daemon=True).start()
