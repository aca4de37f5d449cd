"""Implements the engine, which represents one member of a job to a strategy or a plain training loop; one training
thread uses it.

Theory of operation. `prepare` lays out gradients and installs hooks; `join` says hello, waits for a view and, for a
newcomer, fetches the state. Then every optimizer step is `arm` (before the accumulation's last backward pass) and
`step` (after it); every small collective is `gather`; between two accumulations `boundary` lets newcomers in when the
last header asks for it. All of them are slots of one chain (protocol/types.py) and return its headers. Each wait has a
deadline and wakes when this member is put out, disagrees, or loses its scheduler for too long.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.control.hosting import host_for_engine
from chaos_lightning.errors import (
    ChaosError,
    ConfigurationError,
    DeadlineError,
    DepartedError,
    DisagreementError,
    FencedError,
    FinishedJobError,
    NoDonorError,
    NotNowError,
    RestartError,
)
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.addresses import read_ports, split_endpoint
from chaos_lightning.machine.fits import Fit
from chaos_lightning.machine.notice_watch import NoticeWatch
from chaos_lightning.machine.orphan import watch_parent
from chaos_lightning.member.calls import users_line
from chaos_lightning.member.choice import TransferChoice
from chaos_lightning.member.control_stream import ControlStream
from chaos_lightning.member.entrance import Entrance, no_replay
from chaos_lightning.member.hello import Asks, hello, listening_address
from chaos_lightning.member.keeping import Keeping, LoadedCheckpoint
from chaos_lightning.member.keyring import Keyring
from chaos_lightning.member.losses import Losses
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.part_hashes import PartHashes
from chaos_lightning.member.part_moves import HeldParts, PartMoves, PartReader
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.member.unit_steps import MOVES_NOTHING, Attempt, Attempts, UnitsDone, UnitStep, await_commit
from chaos_lightning.member.waiting import Waiting
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.effects import Committed
from chaos_lightning.membership.peers import FIT
from chaos_lightning.membership.slots import fitting
from chaos_lightning.planning.assignment import ruling_view
from chaos_lightning.planning.plans import check_bytes
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Contribution,
    Header,
    Hello,
    Kind,
    Saved,
    Span,
    Spent,
    View,
    ViewId,
)
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.replay import Replay
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Endpoint
from chaos_lightning.security.credentials import Credentials, check_bind
from chaos_lightning.service.options import forget_logs, log_folder
from chaos_lightning.settings import EngineConfig
from chaos_lightning.transport.frames import FrameType
from chaos_lightning.transport.links import Links
from chaos_lightning.transport.loop import IoLoop
from chaos_lightning.transport.reference import Generation

_log = logging.getLogger("chaos_lightning")
OTHERS_SAVE = "the others go on, and their writer saves"
MAY_GO_S = 0.5
"""Seconds that the only member, which leaves, waits for the scheduler to let it go, before it takes another step."""
NOT_NOW_PAUSE_S = 1.0
"""Seconds until a newcomer that cannot begin where it was let in comes again."""
NO_DONOR_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts of a newcomer that reached no donor; each attempt may make the others wait."""
READING_SHARE = 0.75
"""Share of a slot's time in which parts are read for a file: those that wait for its outcome are told of a failure."""
LOG_PATIENCE_S = 0.25
"""Seconds that a slot that reduces nothing waits for the copy of the step before it, while a newcomer observes."""


@dataclass(frozen=True, slots=True)
class _Made:
    """Objects that `Engine.prepare` makes."""

    shell: Shell
    accumulation: Accumulation
    entrance: Entrance


class Engine:
    """Member of a job, as a strategy or a training loop calls it.

    Attributes:
        view: The view that rules the coming slot.
        ruling_view: The view that the last header named: it assigns the coming step (protocol.md 10).
        header: Last committed header.
        contributors: Members that brought its shares, in rank order; of the header at which this member came in, those
            that have the state.
        role: "founder" or "joiner", after `join`; "late" if the job was finished before, and this process has its
            final state.
        resumed: This founder went on from a state that the last member of the job had kept in a file.
        founders: Members of the view that founded the job, or founded it again, if this one is among them; empty if it
            came later.
        leaving: This member has asked to leave; training stops when a header lets it go.
        out: A header excluded this member (it left).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.name = config.name
        self.view: View | None = None
        self.ruling_view: View | None = None
        self.contributors: tuple[str, ...] = ()
        self.header: Header = GENESIS
        self.role = ""
        self.resumed = False
        self.founders: tuple[str, ...] = ()
        self.leaving = False
        self.out = False
        logs = log_folder(config.log_dir, config.job, split_endpoint(config.endpoints[0])[1])
        self.events = EventLog.in_directory(logs, config.name, day_nbytes=config.log_day_nbytes)
        forget_logs(config.log_dir)
        self._token = Credentials.load(config.keys_dir, config.token_file)
        self.losses = Losses(self.events)
        self._keeping = Keeping(config, self.events)
        self._mail = Mailbox(config.name, endpoint=config.endpoint)
        self._keys = Keyring(config.links, self.events, self._mail)
        self._loop = IoLoop("chaos-io", self._on_crash)
        self._links = Links(
            self._loop,
            config.job,
            self._token,
            lambda line: self.events.emit("refused", reason=line),
            keys=self._keys,
            generation=Generation() if config.by_reference else None,
        )
        self._waiting = Waiting(self._mail, self.events, self._links.severed)
        self._control = ControlStream(config, self._token, self._mail, self._waiting)
        self._transfer = Transfer(
            config.job,
            self._token,
            self._mail,
            self.events,
            TransferChoice.of(config),
            self._links,
            self._keys,
            self._control.send,
        )
        self._notices = NoticeWatch(
            config.notice_plan,
            config.name,
            self.events,
            self.leave,
            over=lambda: self.out or self.header.kind is Kind.CLOSING,
            step_s=lambda: self._made.shell.heartbeat().step_time_s if self._made is not None else 0.0,
        )
        self._made: _Made | None = None
        self._moves: PartMoves | None = None
        self._hashes: PartHashes | None = None
        self._closed_under: View | None = None
        """View in which the last header was closed, if it has pipelines."""
        self._unstepped = False
        """Whether a step's header is here, and the optimizer has not stepped on it: no part is as at that header."""
        self._hello: Hello | None = None
        self._replay: Replay | None = None
        self._loaded: LoadedCheckpoint | None = None
        self._fit: Fit | None = None
        self._saved: Saved | None = None
        self._unserved: Header | None = None
        self._closed = False

    # ------------------------------------------------------------------ facts

    @property
    def member_id(self) -> str:
        return self._mail.member.id if self._mail.member is not None else ""

    @property
    def rank(self) -> int:
        """Rank in the view: 0 is the oldest member; -1: this member is in no view yet."""
        ids = self.view.ids() if self.view is not None else ()
        return ids.index(self.member_id) if self.member_id in ids else -1

    @property
    def world_size(self) -> int:
        return len(self.view.members) if self.view is not None else 1

    # ------------------------------------------------------------------ set-up

    def prepare(
        self,
        *,
        sections: Sequence[Section],
        buffers: Sequence[tuple[str, Tensor]] = (),
        part_of: Mapping[str, str] | None = None,
    ) -> None:
        """Lays out gradients and reduced buffers, allocates the flat memory and installs the hooks.

        Args:
            sections: Parameters of each optimizer, of the whole model.
            buffers: Buffers that are averaged with each step.
            part_of: Part of the training state of each parameter and buffer, if steps run as units; memory is made
                once this member knows what it owns.
        """
        layout = Layout(sections, buffers, part_of)
        check_bytes(self.config.plan, self.config.plan_spec, layout.nbytes, layout.spans())
        memory = Memory(layout, self.config.chunk_nbytes, None if part_of is None else ())
        shell = Shell(
            self._loop,
            self._mail,
            self.events,
            self._links,
            self._transfer,
            self._keys,
            self._control.send,
            memory,
        )
        accumulation = Accumulation(memory, self.config.overlap, self._loop, shell.reducer)
        entrance = Entrance(shell, self._mail, self._transfer, accumulation, self._keeping.load)
        self._made = _Made(shell, accumulation, entrance)

    @property
    def accumulation(self) -> Accumulation:
        """Accumulation of gradients for the present step, which units of micro-batches add to."""
        return self._prepared().accumulation

    def send_border(
        self, peer: str, kind: FrameType, view: ViewId, seq: int, start: int, payload: Sequence[memoryview]
    ) -> None:
        """Sends border tensors to another member; they must not change until they are sent. Any thread."""
        self._loop.call(lambda: self._links.chunk(peer, kind, view, seq, start, payload))

    def attach(self, units: UnitStep, held: HeldParts | None = None) -> None:
        """Makes steps run as units of micro-batches. To be called after `prepare` and before `join`.

        Args:
            units: This member's part of such steps.
            held: The parts of the state in this process; None: every member has the whole state.
        """
        shell = self._prepared().shell
        shell.units = units
        if held is None:
            return

        def tell(loaded: fx.StateLoaded) -> None:
            self._loop.call(lambda: shell.feed(loaded))

        self._moves = PartMoves(held, self._transfer, self._mail, tell, lambda: shell.machine.parts.held, self.events)
        self._hashes = PartHashes(self._moves.states, self.events, self.config.state_hash_every)
        self._keeping.held = held
        self._prepared().entrance.moves = self._moves

    @property
    def layout_hash(self) -> str:
        return self._made.accumulation.layout.hash if self._made is not None else ""

    def join(
        self,
        *,
        fingerprint: Mapping[str, str],
        quota: int,
        accumulate: int,
        state: StateAccess,
        replay: Replay | None = None,
        loaded: LoadedCheckpoint | None = None,
        pipelines: str = "",
        batch: str = "",
    ) -> Header:
        """Joins the job: says hello, gets links and a view, and the state if other members have it.

        Args:
            fingerprint: Values that must equal the job's, by name; a mismatch is refused with both values.
            quota: Samples per micro-batch of this member.
            accumulate: Micro-batches per optimizer step; must equal the job's.
            state: The training state that a newcomer receives, a founder publishes. Where steps run as units, the rest
                of it, beside the parts of the model that `attach` was given.
            replay: Replays steps at this member; without it, the member comes in by a pause.
            loaded: `state` holds this checkpoint already; of the states that a last member kept, only one that goes on
                from it may replace it (14c).
            pipelines: Request of this member to a job that runs in pipelines (`PipelineRequest.to_json`); "": it holds
                the whole state.
            batch: Batch of a step, whoever is there (planning/batch.py, BatchRule); "": each member adds `quota`.

        Returns:
            The header that this member's state stands on (GENESIS for a new job).

        Raises:
            RefusedError: The scheduler did not let this member in; the message says why.
            DeadlineError: No admission within `join_timeout_s`.
            DepartedError: `leave` was called meanwhile (by another thread).
            FinishedJobError: The job was finished before, and its final state is not on this machine.
            RestartError: The job ended meanwhile, as its pipelines cannot go on.
        """
        made = self._prepared()
        started = time.monotonic()
        deadline = started + self.config.join_timeout_s
        if not self._links.port:  # they outlive a rejoin, the agent does not
            self._start_network(made.shell)
        self._fit = self._fit or Fit(self.config.job, self.config.endpoint)
        self._hello = hello(
            self.config,
            port=self._links.port,
            quota=quota,
            accumulate=accumulate,
            fingerprint={**fingerprint, FIT: str(self._fit.number)},
            layout=made.accumulation.layout,
            no_replay=no_replay(self.config, replay),
            asks=Asks(pipelines, batch),
        )
        self._replay, self._loaded = replay, loaded
        if self._moves is not None:
            self._moves.rest = state
        pauses = iter(NO_DONOR_PAUSES_S)
        while True:
            self._control.open(made.shell, self._make_hello)
            try:
                header = self._admission(made, state, deadline)
                break
            except FinishedJobError as end:
                return self._come_late(state, deadline, end)
            except (FencedError, NoDonorError) as error:
                if self.leaving:
                    raise self._waiting.give_up(self._control.close) from error
                pause_s: float | None = NOT_NOW_PAUSE_S if isinstance(error, NotNowError) else 0.0
                if isinstance(error, NoDonorError):
                    pause_s = next(pauses, None)
                if pause_s is None or time.monotonic() > deadline:
                    raise
                # It was frozen or cut off on the threshold: nothing is lost but the place in the queue.
                self.events.emit("rejoin", old_id=self.member_id, reason=str(error))
                self._forget()
                self._mail.pause(pause_s)
        made.accumulation.settle()
        self._tell_of_loss(made.shell.machine.assigning)
        if self.noticed:  # while it was forgotten who this member was
            self.leave(self.noticed)
        self._waiting.over(f"this member is rank {self.rank} of {self.world_size}")
        report = self._transfer.report
        self.events.emit(
            "joined",
            id=self.member_id,
            role=self.role,
            job=self.config.job,
            endpoint=self.config.endpoint,
            rank=self.rank,
            world_size=self.world_size,
            seq=header.seq,
            step=header.step,
            seconds=round(time.monotonic() - started, 4),
            by_source=report.by_source if report else {},
            skipped=report.skipped if report else 0,
        )
        if self.events.path is not None:
            self._transfer.teller.tell(f"I log events in {self.events.path.parent} (log_dir=none: nowhere)")
        return header

    def _come_late(self, state: StateAccess, deadline: float, end: FinishedJobError) -> Header:
        """Continues with the final state of a job that is already finished; raises FinishedJobError if that state is
        not on this machine.
        """
        over, mail = self._mail.job_over, self._mail
        assert over is not None
        assert self._hello is not None
        mail.post(left=over.reason)
        header = self._keeping.load_final(over.chain, self._hello, state, deadline)
        self.events.emit("came_late", reason=str(end), step=header.step if header is not None else -1)
        what = f"{end}. To train it anew at once: `chaos-lightning reset`, or another job name"
        if header is None:
            text = f"{what}. This process ends here, for the final state is not on its machine"
            _log.warning(text)
            raise FinishedJobError(text) from end
        _log.warning("%s. This process goes on behind the training, with the final state of step %d", what, header.step)
        self.role, self.out, self.header = "late", True, header
        self.view = self.ruling_view = over.view
        return header

    def _tell_of_loss(self, founded: View | None) -> None:
        """Warns on the terminal if the job begins again from the start although it had got further before."""
        if self.header == GENESIS and founded is not None and founded.predecessor != NO_VIEW:
            self.events.emit("notice", text=founded.reason, waiting=False)
            _log.warning("%s: the job begins anew, from what it was started with: %s", self.member_id, founded.reason)

    def _start_network(self, shell: Shell) -> None:
        bind = listening_address(self.config)
        check_bind(bind, self._token)
        watch_parent()
        self._notices.start()
        host_for_engine(self.config, given_up=lambda: self.leaving)
        shell.listen(bind, read_ports(self.config.port))
        self._loop.start()

    def _make_hello(self) -> Hello:
        assert self._hello is not None
        shell = self._prepared().shell
        said = replace(self._hello, saved=self._saved, **shell.machine.knowledge())
        if said.view != NO_VIEW:
            return said
        kept = self._keeping.offer(said, self._loaded)
        self._loop.call(lambda: shell.offered(kept))
        return replace(said, kept=kept)

    def _admission(self, made: _Made, state: StateAccess, deadline: float) -> Header:
        """Waits until this member is in a view; a joiner fetches the state first."""
        place = made.entrance.enter(state, self._replay, deadline)
        if place is None:
            self.leaving = True  # if it was not by `leave`, then the operator has drained it
            raise self._waiting.give_up(self._control.close)
        self.role, self.header, self.view = place.role, place.header, place.view
        named = place.header.view_change or place.view
        holders = tuple(m for m in named.ids() if m not in named.joiners)
        self.contributors = holders if place.header.shares else ()
        self.resumed = place.role == "founder" and place.header != GENESIS
        # A recovery may have put a newer view in force; the assignment follows the one that the header named (10), and
        # before the first slot, which cannot commit without this thread, the founding one, which the machine remembers.
        founded = self.header.next_view == NO_VIEW
        known = (self.header.view_change, made.shell.machine.assigning if founded else self.view)
        self.ruling_view = ruling_view(self.header, [v for v in known if v is not None])
        self.founders = self.ruling_view.ids() if founded and self.ruling_view is not None else ()
        return self.header

    def publish(self, header: Header, state: StateAccess) -> None:
        """Begins to serve the state at `header` to newcomers, until the next slot commits."""
        self._refuse_unstepped("a state that others get")
        if self._moves is not None:
            if self.view is not None:
                self._moves.serve(header, self.view)
            return
        self._transfer.publish(header, state, self._prepared().accumulation.layout)

    # ------------------------------------------------------------------ a step

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which backward passes accumulate gradients without sending them."""
        return self._prepared().accumulation.hold()

    def arm(self, *, coefficient: float, section: int = 0, empty: bool = False) -> None:
        """Announces that the accumulation's last backward pass comes next, so that gradients are sent as they come.

        Args:
            coefficient: Factor of this member's gradient in the sum.
            section: Index of the section whose parameters step.
            empty: Whether this member has no gradient for this step (weight 0).
        """
        self._raise_pending()
        self._prepared().accumulation.arm(self.header.seq + 1, coefficient=coefficient, section=section, empty=empty)

    @property
    def sending(self) -> bool:
        """Whether gradients of the announced last backward pass are being sent already, so that it cannot be declared
        empty any more.
        """
        return self._prepared().accumulation.sending

    def step(
        self,
        *,
        weight: float,
        coefficient: float,
        spent: Sequence[Spent] = (),
        section: int = 0,
        hyper: str = "",
        order: str = "",
        state_hash: str = "",
        yields: bool = False,
        payload: bytes = b"",
    ) -> Header:
        """Contributes the accumulated gradients and waits for the step's commit.

        Afterwards `.grad` of the section's parameters holds sum(coefficient * gradient) / sum(weight) over all
        contributors (None where nobody had one), and reduced buffers their mean.

        Args:
            weight: This member's part of the divisor, in the same unit as `coefficient`; 0 with no samples.
            coefficient: Factor of this member's gradient in the sum.
            spent: Sample ranges that this member used.
            section: Index of the optimizer that steps.
            hyper: Hyperparameters in words; compared at the root.
            order: Order of the epoch's samples in words; compared at the root.
            state_hash: Hash of the replicated state before the step, every n steps.
            yields: This member leaves and follows its script no more, or has no samples and runs no training step: if
                the others close another kind of slot, it goes along, and the header is of that kind.
            payload: Bytes of this member that go with its gradient; the header has those of all members as `answers`,
                in rank order, unless all are empty.

        Raises:
            FencedError, DisagreementError, RestartError, DeadlineError: See errors.py; nothing was applied.
        """
        accumulation = self._prepared().accumulation
        if accumulation.seq != self.header.seq + 1 or accumulation.section != section:
            self.arm(coefficient=coefficient, section=section, empty=weight == 0 and coefficient == 0)
        presence = accumulation.flush()
        header = self._slot(
            Kind.STEP,
            name=f"section {section}",
            weight=weight,
            coefficient=coefficient,
            presence=presence,
            spent=tuple(spent),
            hyper=hyper,
            order=order,
            state_hashes=(state_hash,) if state_hash else (),
            yields=yields,
            payload=fitting(payload),
        )
        if header.kind is not Kind.STEP:
            accumulation.move(header.seq + 1)
            return header
        accumulation.apply(header)
        self._transfer.settle()
        return header

    def step_by_units(
        self, attempt: Attempt, *, section: int = 0, hyper: str = "", order: str = "", state_hash: str = ""
    ) -> Header:
        """Runs a step as units of micro-batches, again after each recovery, and waits for its commit.

        Afterwards `.grad` of the parameters that this member owns holds the average, and reduced buffers their mean.
        The optimizer must step, and `stepped` be called, before the next slot of any kind: parts are given to others in
        it. Every `state_hash_every` steps the parts that this member owns are compared with those of other owners.

        Args:
            attempt: Runs this member's units.
            section: Index of the optimizer that steps.
            hyper: Hyperparameters in words; compared at the root.
            order: Order of the epoch's samples in words; compared at the root.
            state_hash: As of `step`, where every member has the whole state.

        Raises:
            FencedError, DisagreementError, RestartError, DeadlineError: See errors.py; nothing was applied.
            DepartedError: This member is let go, and stands on the header before.
            UnsupportedError: A part of the state differs again from the others'.
            ConfigurationError: `stepped` was not called after the step before.
            Exception: Any error that a unit raised.
        """
        hashes, me = self._hashes, self.member_id
        words: dict[str, object] = {
            "name": f"section {section}",
            "coefficient": 1.0,
            "hyper": hyper,
            "order": order,
        }
        if hashes is None:
            words["state_hashes"] = (state_hash,) if state_hash else ()
            return self.begin_units(Kind.STEP, lambda _: words).run(attempt)

        def attempted(view: View, seq: int) -> UnitsDone:
            hashes.at(self.header, view, me)  # the state is that of the header now
            return attempt(view, seq)

        header = self.begin_units(
            Kind.STEP, lambda view: {**words, "state_hashes": hashes.at(self.header, view, me)}
        ).run(attempted)
        self._unstepped = True
        if self._closed_under is not None:
            hashes.settle(header, self._closed_under, me)
        return header

    def gather_by_units(self, name: str, attempt: Attempt, *, order: str = "") -> Header:
        """Runs a collective whose payloads are computed by units of micro-batches, again after each recovery
        (protocol.md P17).

        Args:
            name: Name of the collective; equal at all members.
            attempt: Runs this member's units, which reduce nothing.
            order: Which samples they run on, in words; compared at the root.

        Returns:
            The header; its `answers` are the payloads of `contributors`.

        Raises:
            FencedError, DisagreementError, DeadlineError: See errors.py.
            Exception: Whatever a unit raised.
        """
        header = self.begin_units(Kind.GATHER, lambda view: {"name": name, "order": order}).run(attempt)
        self._prepared().accumulation.move(header.seq + 1)
        return header

    def begin_units(self, kind: Kind, fields: Callable[[View], Mapping[str, object]]) -> Attempts:
        """Begins the next slot as one whose units the caller runs, as `step_by_units` and `gather_by_units` do.

        Args:
            kind: Kind of the slot; of a STEP averages are in their places once its header is there.
            fields: Returns what is contributed in a view beside the results of units.
        """
        made = self._prepared()
        units = made.shell.units
        if units is None:
            raise ConfigurationError("there are no units to run; call attach() before join()")
        self._raise_pending()
        self._refuse_unstepped(f"the next {kind}")
        if kind is not Kind.STEP:
            self._transfer.server.log.settle(LOG_PATIENCE_S)

        def contribute(view: View, done: UnitsDone) -> None:
            said = {**vars(done), **fields(view), "payload": fitting(done.payload)}
            contribution = self._contribution(kind, said, view=view.id)
            self._loop.call(lambda: made.shell.contribute(contribution))

        def take(commit: Committed) -> Header:
            header = self._take(commit)
            if kind is Kind.STEP:
                units.commit(header)
                self._transfer.settle()
            return header

        timeout_s, moves = self.config.step_timeout_s, self._moves or MOVES_NOTHING
        return Attempts(
            units,
            moves,
            self._mail,
            self.header,
            contribute,
            take,
            lambda: time.monotonic() + timeout_s,
            kind,
            self._noticing,
        )

    def stepped(self) -> None:
        """Notes that the optimizer has applied the average from `step_by_units`, so that parts match the last header
        again.
        """
        self._unstepped = False

    def _refuse_unstepped(self, what: str) -> None:
        if self._unstepped:
            raise ConfigurationError(
                f"{what} comes between the commit of step {self.header.step} and the optimizer's step on it, where "
                "other members would get parts of the training state that are not stepped yet; call optimizer.step() "
                "and then engine.stepped() first"
            )

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Context manager that marks this member as out if the block raises DepartedError because a view left it
        out.
        """
        try:
            yield
        except DepartedError:
            self.out = self.out or self._mail.let_go is not None
            raise

    def gather(
        self, name: str, payload: bytes, *, yields: bool = False, lets_go: bool = False, line: str = ""
    ) -> list[tuple[str, bytes]]:
        """Runs a numbered collective: returns every member's payload, in rank order (protocol.md 28).

        Args:
            name: Name of the collective; equal at all members.
            payload: Bytes that this member contributes.
            yields: Whether this member goes along if the others make one by another name first; the header tells that
                name.
            lets_go: Whether members that wait to leave may go with it, this one included; equal at all members.
            line: Line of the user's code that it is for; "": the line that calls now.

        Returns:
            (member id, payload) of all contributors; b"" of one that yielded.

        Raises:
            DisagreementError: Members make different calls, or their payloads are too large together; raised at all.
        """
        said = fitting(payload)
        header = self._slot(Kind.GATHER, line, name=name, payload=said, yields=yields, lets_go=lets_go)
        self._prepared().accumulation.move(self.header.seq + 1)
        return list(zip(self.contributors, header.answers, strict=True))

    def share_parts(self) -> PartReader:
        """Serves all parts that this member has until the next slot commits. All members call it, between slots.

        Returns:
            A reader of the parts that others hold at this header.
        """
        if self._moves is None:
            raise ConfigurationError("share_parts() without parts; call attach() before join()")
        self._moves.serve_all(self.header)
        return PartReader(self._moves, self.header, time.monotonic() + READING_SHARE * self.config.step_timeout_s)

    @property
    def server(self) -> StateServer:
        """Server of this member's states to other members; further named states can be served, too."""
        return self._transfer.server

    def ways(self, members: Collection[str]) -> list[Endpoint]:
        """Returns the addresses for bulk connections to those of the given members that are in the view. Any thread."""
        view = self.view
        return self._transfer.ways([m for m in view.members if m.id in members], view) if view is not None else []

    def dial(self, donor: Endpoint) -> socket.socket:
        """Returns an authenticated bulk connection to another member. Any thread."""
        return self._transfer.dial(donor)

    def boundary(self, state: StateAccess) -> Header:
        """Takes part in a boundary between two accumulations, at which newcomers enter, and serves the state to
        them.
        """
        self.admit(header := self._slot(Kind.BOUNDARY, name="boundary"), state)
        return header

    def admit(self, header: Header, state: StateAccess) -> None:
        """Serves the state to newcomers, if the boundary's header admits any."""
        if header.view_change is not None and header.view_change.joiners and not self.out:
            self.publish(header, state)
        self.events.emit("boundary", seq=header.seq)

    def serve(self, state: StateAccess) -> None:
        """Makes a snapshot for newcomers that replay, if the last header names any. To be called between two
        accumulations, after the optimizer's step. Cheap otherwise.
        """
        header, self._unserved = self._unserved, None
        if header is not None and not self.out:
            self._transfer.snapshot(header, self.view, state, self._prepared().accumulation.layout)

    def _slot(self, kind: Kind, line: str = "", **fields: object) -> Header:
        """Contributes to the next slot and waits until it is committed."""
        self._raise_pending()
        self._refuse_unstepped(f"a slot of another kind ({kind})")
        if kind is not Kind.STEP:
            self._transfer.server.log.settle(LOG_PATIENCE_S)
        contribution = self._contribution(kind, fields, line=line)
        shell = self._prepared().shell
        self._loop.call(lambda: shell.contribute(contribution))
        mail = self._mail
        deadline = time.monotonic() + self.config.step_timeout_s
        what = f"the commit of slot {contribution.seq} ({kind})"
        if self._moves is not None:
            with self._noticing():
                commit = await_commit(self._moves, mail, self.header, what, deadline)
            return self._take(commit)
        with mail.changed:
            mail.wait(lambda: bool(mail.commits), what, deadline)
            commit = mail.commits.popleft()
        return self._take(commit)

    def _contribution(
        self, kind: Kind, fields: Mapping[str, Any], *, line: str = "", view: ViewId = NO_VIEW
    ) -> Contribution:
        return Contribution(
            member=self.member_id,
            view=view,
            seq=self.header.seq + 1,
            kind=kind,
            step=self.header.step,
            prev_hash=self.header.hash,
            layout_hash=self.layout_hash,
            line=line or users_line(),
            **fields,
        )

    def _take(self, commit: Committed) -> Header:
        """Makes a committed header the present one; raises DisagreementError if it carries an error."""
        header, view, shell = commit.header, commit.view, self._prepared().shell
        with self._mail.changed:
            self.view, self._closed_under = self._mail.view, self._mail.closed_under
        if self._moves is not None:
            self._moves.committed(self._closed_under)
        self._waiting.over(f"the job goes on after step {header.step}")
        if header.error:
            self.events.emit("error", what="disagreement", reason=header.error)
            raise DisagreementError(header.error)
        if shell.machine.serving.copies:
            self._unserved = header
        self.header, self.ruling_view, self.contributors = header, view, commit.contributors
        if self.member_id not in view.ids():
            self.out = True
        return header

    # ------------------------------------------------------------------ going

    def leave(self, reason: str) -> None:
        """Requests to leave the job; any thread may call it. Training continues until a header lets this member go; a
        member in no view yet stops waiting.
        """
        if not self.leaving:
            self.leaving = True
            if self._made is not None:
                shell = self._made.shell
                self._loop.call(lambda: shell.feed(fx.LeaveRequested(reason)))
            self._mail.post(giving_up=not self.role)

    def heed(self, signal_name: str) -> None:
        """Leaves the job because of a signal: at once, or when the setting `notice` says so of this signal. It may wait
        for that, and takes locks: to be called in a thread of its own.
        """
        if not self._notices.heed(signal_name):
            self.leave(f"signal {signal_name}")

    @property
    def noticed(self) -> str:
        """Notice because of which this member leaves, in words; "" if none is due."""
        return self._notices.reason

    def may_go(self) -> bool:
        """Returns whether this leaving member, the only one in its view, was released or has lost its scheduler.

        Newcomers may be about to come in: then it is needed, for they get its state.
        """
        mail, until = self._mail, time.monotonic() + MAY_GO_S
        with mail.changed:
            while not (mail.left or mail.lost or mail.ejected or mail.crash) and (
                (left_s := until - time.monotonic()) > 0
            ):
                mail.changed.wait(left_s)
            return bool(mail.left or mail.lost)

    def keep(
        self,
        state: StateAccess,
        checkpoints: Sequence[str] = (),
        *,
        counted: int | None = None,
        stuck: bool = False,
    ) -> None:
        """Writes the training state to a file from which the job can be founded again, as this member goes (protocol.md
        14c). No header lets it go, since others that have the state may be gone, too. If members hold parts of it, one
        view lets all of them go, and each writes its parts (P13).

        Args:
            state: State at `header`; changes of reduced buffers by forward passes since then are undone here.
            checkpoints: Header hashes of the checkpoints that the state goes on from.
            counted: Steps as the script counts them, with those before the job began; None: the job's own.
            stuck: Whether this member goes since no member can go on, and not because it was asked to.
        """
        mail, gone = self._mail, self._view_without()
        parts = self._moves is not None and gone is not None and not gone.members
        with mail.changed:
            asked = self.leaving or mail.giving_up or stuck or parts
            void = mail.ejected is not None or mail.crash is not None or (self.out and not parts)
        if not self.role or self.view is None or void or not asked or self.header.kind is Kind.CLOSING:
            return
        if self._moves is not None and mail.left and not (mail.keeps or parts):
            text = "%s: its parts of the training state at step %d are not kept: %s"
            _log.warning(text, self.member_id, self.header.step, mail.left)
            return
        assert self._hello is not None
        divided = self._parts_to_keep()
        kept = self._keeping.keep(
            self.header, self.view, self.member_id, self._hello, state, checkpoints, counted, divided
        )
        if kept is not None and (parts or self._moves is None):
            self._control.send(kept)

    def _parts_to_keep(self) -> tuple[ViewId, tuple[Span, ...]] | None:
        """Returns the parts of the state that this member has, with the view in which the last header was closed; None
        if the job has no pipelines.
        """
        if self._moves is None:
            self._prepared().accumulation.restore()
            return None
        self._refuse_unstepped("a state that is kept")
        founded = self.ruling_view if self.header.next_view == NO_VIEW else None  # no slot has been closed since
        closed = founded.id if founded is not None else self.header.view
        return closed, self._prepared().shell.machine.parts.held

    @property
    def saved_by(self) -> str:
        """Describes in words who saves the state instead of this member, which has left the job."""
        gone = self._view_without()
        if gone is not None and gone.members:
            return OTHERS_SAVE
        return self._mail.left or "all members leave"

    def _view_without(self) -> View | None:
        """Returns the view that leaves this member out; None if none does."""
        decided = self._mail.let_go
        return decided if decided is not None or not self.out else self.header.view_change

    def saved(self, step: int, path: str) -> None:
        """Reports a checkpoint to the scheduler, which names it if the job ends because its pipelines cannot continue.

        Args:
            step: Number of optimizer steps in its state.
            path: Place of the file.
        """
        self._saved = Saved(step, path)
        self._control.send(self._saved)

    def finish(
        self, state: StateAccess | None = None, meanwhile: contextlib.AbstractContextManager[None] | None = None
    ) -> None:
        """Takes part in the job's last slot; waits until all members have it, or for at most the linger time.

        Args:
            state: At the end. If others have been in the job, one member of each machine keeps it for those who come
                late (protocol.md 14d).
            meanwhile: Is entered while that is written.
        """
        if not self.out:
            others = self._mail.together or self.resumed
            in_parts = self._moves is not None
            lock = self._keeping.final_lock() if state is not None and others and not in_parts else None
            try:
                if self.header.kind is not Kind.CLOSING:  # else others closed the job in a slot that this one yielded
                    self._slot(Kind.CLOSING, name="closing")
                self.events.emit("finished", seq=self.header.seq, step=self.header.step)
                self._keeping.clear(self.view.chain if self.view is not None else "")
                if in_parts and others and self.rank == 0:
                    self._keeping.lacks_final(self.header.step, self._saved, self.member_id)
                if lock is not None and state is not None and self.view is not None and self._hello is not None:
                    with meanwhile or contextlib.nullcontext():
                        self._keeping.keep_final(self.header, self.view, self.member_id, self._hello, state)
            finally:
                if lock is not None:
                    lock.close()
        self.wait_released()

    def wait_released(self, timeout_s: float = 10.0) -> None:
        """Waits, after leaving or finishing, until no other member needs this one any more.

        Args:
            timeout_s: So long at most. One whose parts others may lack waits on as long as a scheduler serves it (P9).
        """
        mail, gone = self._mail, self._view_without()
        serves = self._moves is not None and gone is not None and self.header.kind is not Kind.CLOSING
        if self._moves is not None and gone is not None and serves:
            self._refuse_unstepped("a state that others get")
            self._moves.serve(self.header, gone)
        with mail.changed, contextlib.suppress(ChaosError, RestartError):
            while not mail.left:
                try:
                    mail.wait(lambda: bool(mail.left), "release", time.monotonic() + timeout_s, tells=False)
                except DeadlineError:
                    if not serves or mail.lost:
                        raise

    def rejoin(self, state: StateAccess) -> Header:
        """Discards this member's place in the job after FencedError, and joins again in the same process (protocol.md
        11).

        Raises:
            DepartedError: This member was asked to leave, so it does not come back.
        """
        assert self._hello is not None
        if self.leaving:
            raise self._waiting.give_up(self._control.close)
        said = self._hello
        self.events.emit("rejoin", old_id=self.member_id)
        self._forget()
        whose = {"fingerprint": dict(said.fingerprint), "quota": said.quota, "accumulate": said.accumulate}
        more = {"replay": self._replay, "loaded": self._loaded, "pipelines": said.pipelines, "batch": said.batch}
        return self.join(**whose, state=state, **more)  # type: ignore[arg-type]

    def _forget(self) -> None:
        """Returns to the condition before the hello: a fresh machine, no view, no published state (protocol.md 11)."""
        self._control.close()  # first: what the scheduler said to who this member was does not concern the next
        made = self._prepared()
        if not self._loop.call_and_wait(made.shell.reset, 10.0):
            raise DeadlineError("the I/O thread did not answer within 10 s while joining again")
        self._transfer.forget()
        self._mail.reset()
        made.accumulation.abandon()
        if self._moves is not None:
            self._moves.restart()
        self.view = self.ruling_view = None
        self.founders = ()
        self._closed_under, self._unstepped = None, False
        self.header, self.role, self.out, self.leaving, self.resumed = GENESIS, "", False, False, False

    def close(self) -> None:
        """Ends threads, links and the log. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._fit is not None and (self.role or self.leaving):  # one that was refused may be tried again
            self._fit.over()
        self._notices.close(
            last=self.view is not None and self.view.ids() == (self.member_id,),
            finished=self.header.kind is Kind.CLOSING,
        )
        self._control.close()
        self._keeping.close()
        if self._links.port:
            self._loop.call_and_wait(self._links.close, 2.0)
            self._loop.stop()
            self._links.wait_closed()
        self._transfer.close()
        if self._made is not None:
            self._made.accumulation.close()
        self.events.close()

    # ------------------------------------------------------------------ inside

    def _prepared(self) -> _Made:
        if self._made is None:
            raise ConfigurationError("call prepare() first: members compare their layouts when they join")
        return self._made

    def _on_crash(self, error: BaseException) -> None:
        self.events.emit("error", what="io", reason=repr(error))
        self._mail.post(crash=error)
        if self._made is not None:
            self._made.shell.end_units()

    def _raise_pending(self) -> None:
        with self._mail.changed:
            self._mail.check()


__all__ = ["Engine", "EngineConfig", "Section"]
