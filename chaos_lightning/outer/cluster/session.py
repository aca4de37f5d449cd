"""Runs a cluster's part in an outer job for its training loop, which calls a method at the start, after each step (a
boundary), and at the end.

Theory of operation. `ClusterMachine` says when to freeze, offer and adopt; here is what that means for memory, threads
and connections. The loop's thread alone touches the model: what the machine asks of it waits until the next `boundary`
(or whatever waits in here), where the training stands still. Everything else has threads of its own, so that training
goes on meanwhile: the control stream, heartbeats, one that encodes pushes, one that fetches versions, and those that
serve pushes.

What each effect does to the model, its pushes and its log is `ClusterEffects`' (cluster_effects.py), as in a cluster of
several ranks; what travels to and from followers is `FollowerExchange`'s (exchange.py).

*Positions* of shared data are claimed before they are trained. What was claimed is nobody else's here, and after an
outright adoption nothing is claimed any more: the loop must drop what it has not trained (`Boundary.outright`).

A dismissed incarnation is over; the same process comes in again with a new machine, a new stream and new connections.
Those of the old one stay as long as somebody may ask for its pushes (O5).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from chaos_lightning.errors import (
    ChaosError,
    DeadlineError,
    DepartedError,
    StateError,
)
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.fits import Fit
from chaos_lightning.machine.notice_watch import NoticeWatch
from chaos_lightning.machine.notices import NoticePlan
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.membership.peers import FIT
from chaos_lightning.outer.cluster.attendant import Attendant
from chaos_lightning.outer.cluster.cluster_effects import Boundary, ClusterEffects
from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.exchange import FollowerExchange, Sought, VersionGetter
from chaos_lightning.outer.cluster.leaving import Patience, put_out
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.server_start import host_for_cluster
from chaos_lightning.outer.cluster.training_rates import TrainingRates, Waits
from chaos_lightning.outer.exchange.codec import Part, codec_named, codec_of
from chaos_lightning.outer.rules import cluster as cl
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.cluster import ClusterMachine, Phase
from chaos_lightning.outer.rules.ranks_machine import RankNews
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    TIED,
    Agreement,
    Covered,
    JobProgress,
    ProcessPlace,
    PushId,
    VersionId,
)
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.protocol.spans import count, first_positions, normalise, subtract
from chaos_lightning.protocol.types import Span
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.options import forget_logs

_log = logging.getLogger("chaos_lightning")

_LOOK_S = 0.25


class _Life:
    """One incarnation of a cluster: its state machine and its stream to the leader."""

    def __init__(self, session: OuterSession, machine: ClusterMachine) -> None:
        self.machine = machine
        self.attendant: Attendant | None = None
        self.over = False
        self._session = session

    def name(self) -> str:
        """Returns the name of the incarnation; the cluster's while it has none."""
        return str(self.machine.incarnation or self.machine.name)

    def happened(self, event: RankNews) -> None:
        """Takes news for the machine."""
        self._session.happened(self, event)

    def refused(self, error: ChaosError) -> None:
        """Takes why the server will not let this cluster in, before it was in."""
        self._session.fail(error)

    @property
    def was_in(self) -> bool:
        return self.machine.was_in

    @property
    def job_id(self) -> str:
        return self.machine.job_id


class OuterSession:
    """Part of one cluster in an outer job. Only the loop's thread may call methods, except `leave` and `close`.

    Args:
        replica: Part of the model that clusters exchange.
        agreement: Facts that all clusters of the job have in common (`agreement_of`).
        options: Options of this cluster.
        events: Event log of this cluster.
        batches: Batch sizes of this cluster, in positions of the shared data.
    """

    def __init__(
        self,
        replica: Replica,
        agreement: Agreement,
        options: ClusterOptions,
        events: EventLog | None = None,
        batches: Batches = UNTOLD,
    ) -> None:
        self.options = options
        self.agreement = agreement
        self._fit = Fit(options.job, ",".join(options.endpoints))
        self.over = ""
        """Reason for which this cluster's part is over; "" while it goes on."""
        self.progress = JobProgress()
        """Progress of the job with the base."""
        self._events = events or EventLog(None)
        plan = NoticePlan.read(options.notice)
        self._notices = NoticeWatch(
            plan, options.name, self._events, lambda reason: self.leave(), lambda: bool(self.over)
        )
        if plan.grace_s:
            _log.warning("notice=%s: sigterm is not honoured: clusters leave at SIGTERM at once", options.notice)
        self._secret = Credentials.load(options.keys_dir, options.token_file)
        self._settings = OuterSettings.of_words(agreement.settings)
        self._changed = threading.Condition(threading.RLock())
        self._todo: deque[tuple[cl.ClusterEffect, Part | None]] = deque()
        """Effects for the loop's thread, each with the version that it adopts."""
        self._claimed: dict[int, tuple[Span, ...]] = {}
        self._rates = TrainingRates()
        self._error: ChaosError | None = None
        """Error for which this cluster cannot go on."""
        self._rested_at = 0.0
        self._waits = Waits()
        self._closing = threading.Event()
        here = ProcessPlace(host_identity(), os.getpid(), start_time(os.getpid()))
        place = f"{options.name} (pid {here.pid})"
        machine = ClusterMachine(
            options.name, place, os.urandom(8).hex(), agreement, process=here, overlap=options.overlap,
            ahead_steps=options.ahead_steps,
        )  # fmt: skip
        machine.batches = batches
        self._life = _Life(self, machine)
        self._log = OuterLog(options, self._events, lambda: self._life.machine)
        self._model = ClusterModel(replica, replica.grid(agreement.block), codec_of(agreement))
        getter = VersionGetter(self._changed, self._model.empty, self._sought, self._missed, self._landed)
        self._exchange = FollowerExchange(
            options, self._secret, self._model, self._log, self._events.emit, self._changed, self._life.name, getter
        )
        self._effects = ClusterEffects(
            self._model, self._exchange, self._log, overlap=options.overlap, waited_s=self._waits.take
        )

    # ------------------------------------------------------------------ what others may ask

    @property
    def base(self) -> VersionId:
        """Version that the cluster adopted last."""
        return self._life.machine.base

    @property
    def incarnation(self) -> str:
        """Name of this incarnation, "name~number"; "" until the leader has let the cluster in."""
        return str(self._life.machine.incarnation or "")

    @property
    def job_id(self) -> str:
        """Hash that names the job; "" until the leader has let this cluster in."""
        return self._life.machine.job_id

    @property
    def oldest(self) -> bool:
        """Whether this cluster joined before all others that are in the job: the job ends when the oldest cluster's
        loop does.
        """
        machine = self._life.machine
        return machine.oldest in (None, machine.incarnation)

    @property
    def inner_steps(self) -> int:
        """Number of inner steps from one push of this cluster to the next, as the leader has set it."""
        return self._life.machine.inner_steps

    @property
    def usual_steps(self) -> int:
        """Number of inner steps from one push to the next for a cluster of usual speed."""
        return self._settings.inner_steps

    @property
    def ahead(self) -> tuple[int, int]:
        """(samples, inner steps) that this cluster has trained and that are not in its base."""
        with self._changed:
            return self._life.machine.ahead

    def idle_steps(self, seconds: float) -> int:
        """Returns for how many inner steps at once `boundary` may be called: until the next push is due, and no more
        than fit into `seconds`.

        Args:
            seconds: Seconds of training, as it was measured.
        """
        with self._changed:
            machine = self._life.machine
            due = min(machine.inner_steps, machine.may_be_ahead or machine.inner_steps) - machine.unpushed.steps
            most = int(seconds * machine.step_rate)
            return max(1, min(most, due) if due > 0 else most)

    @property
    def reckoned(self) -> JobProgress:
        """Progress of the job as this cluster estimates it: that of its base, and what it has trained since."""
        with self._changed:
            return self._life.machine.reckoned

    @property
    def at_risk(self) -> int:
        """Number of inner steps of this cluster that no durable version holds."""
        with self._changed:
            return self._life.machine.at_risk

    # ------------------------------------------------------------------ the loop

    def start(self, timeout_s: float = 60.0) -> JobProgress:
        """Founds the job with the model's parameters, or sets them to the job's newest version; returns the job's
        progress.

        Raises:
            RefusedError: The server does not let this cluster in; the message says why.
            ConfigurationError: The job differs; the message says in what, and from whose.
            DeadlineError: No answer came in time; the message says what was waited for.
        """
        forget_logs(self.options.log_dir)
        self._waits.kept_at = time.monotonic()
        host_for_cluster(self.options)
        self._notices.start()
        self._begin(self._life)
        self._exchange.start()
        self._rest(self._is_in, timeout_s)
        self._go_on()
        return self.progress

    def boundary(
        self, samples: int, covers: Sequence[Covered] = (), steps: int = 1, loss: float | None = None
    ) -> Boundary:
        """Counts what was trained since the last call, freezes or adopts if that is due, and returns the outcome;
        called after each inner step.

        Args:
            samples: Samples that the steps used.
            covers: Positions that they used, where data are shared.
            steps: Number of steps.
            loss: Loss of the last step, for the log.

        Raises:
            ChaosError: This cluster cannot go on.
            DeadlineError: An answer or version that this cluster had to wait for did not come within
                `options.patience_s`.
        """
        began = self._waits.kept_at = time.monotonic()
        self._measure(samples, steps, began)
        self._log.trained(steps, samples, loss)
        with self._changed:
            for each in covers:
                self._unclaim(each)
            self._feed(self._life, cl.Trained(samples, tuple(covers), steps), resting=True)
        done = self._rest(self._is_in, self.options.patience_s)
        self._go_on()
        return Boundary(done.adopted, done.outright, done.reset_optimizer, self.over, self._rested_at - began)

    def _go_on(self) -> None:
        self._rested_at = time.monotonic()
        self._waits.let_go(self._rested_at)

    def waited(self, seconds: float) -> None:
        """Adds to the seconds for which training stood still, outside of `boundary`, to send versions to other
        ranks.
        """
        self._waits.add(seconds)

    def claim(self, positions: int, timeout_s: float = 0.0) -> tuple[Covered, ...]:
        """Returns the next positions of the shared data that this cluster shall train; each position is returned once.

        What is left may have to be pushed before there is more: who gets nothing calls `boundary` and asks again.

        Args:
            positions: Largest number of positions to return, all of one epoch.
            timeout_s: Seconds to wait until there are some.

        Returns:
            Nothing: there are none for now, or (`ending`) this cluster is to train no more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ending or self._free() is not None, timeout_s)
            found = self._free()
            if found is None or self._life.machine.phase is not Phase.TRAINING:
                return ()
            epoch, spans = found
            taken = first_positions(spans, self._life.machine.batches.next(positions, count(spans)))
            if not taken:
                return ()
            self._claimed[epoch] = normalise([*self._claimed.get(epoch, ()), *taken])
            return (Covered(epoch, taken),)

    def pause(self, timeout_s: float) -> None:
        """Waits, for at most `timeout_s`, until an event has come that `boundary` would handle."""
        with self._changed:
            self._changed.wait(timeout_s)

    @property
    def ending(self) -> bool:
        """Whether this cluster shall train no further step."""
        machine = self._life.machine
        return bool(self.over or machine.leaving or machine.verdict or machine.phase is Phase.ENDING)

    @property
    def leaving(self) -> bool:
        """Whether this cluster was asked to leave."""
        return self._life.machine.leaving

    def show_base(self) -> None:
        """Replaces the model's parameters by those of the base until `show_own`; nothing may be trained in between."""
        self._model.show_base()

    def show_own(self) -> None:
        """Undoes `show_base`: the model has its trained parameters again. Idempotent."""
        self._model.show_own()

    def finish(self, reason: str, timeout_s: float | None = None) -> None:
        """Pushes, after the loop's end, what is not pushed yet, and waits until the job has ended or the cluster may
        leave.

        A cluster that is through long before the others leaves after `timeout_s`; None: after `options.patience_s`.

        Raises:
            DeadlineError: The cluster was to leave, and could not in that time.
        """
        self._waits.kept_at = time.monotonic()
        leaving, limit_s = self.leaving, timeout_s if timeout_s is not None else self.options.patience_s
        if not leaving:
            self._feed(self._life, cl.LoopOver(reason), resting=True)
        try:
            self._rest(lambda: bool(self.over), limit_s)
        except DeadlineError as error:
            if leaving:
                raise
            _log.warning("%s; this cluster is through, so it leaves, with %s", error, self.base)
            self.leave()
            self._rest(lambda: bool(self.over), limit_s)

    def leave(self) -> None:
        """Asks to leave the job: all that was trained is pushed, and `finish` returns once a durable version holds it.

        Any thread. A signal's handler calls it in a thread of its own, for it takes a lock.
        """
        self._feed(self._life, cl.LeaveAsked())

    def close(self) -> None:
        """Ends threads and connections; progress that was not pushed is lost. Idempotent."""
        if self.incarnation:
            self._fit.over()
        self._notices.close()
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._end(self._life)
        self._exchange.close()
        self._log.console.close()
        self._events.close()

    # ------------------------------------------------------------------ standing still

    def _is_in(self) -> bool:
        machine = self._life.machine
        return bool(self.over) or (machine.phase is Phase.TRAINING and not machine.waits)

    def _rest(self, done: Callable[[], bool], timeout_s: float | None = None) -> Boundary:
        """Carries out the effects that are due, at least once and then until `done` returns true; returns the outcome.

        Raises:
            ChaosError: This cluster cannot go on.
            DeadlineError: After `timeout_s` seconds, `done` has not returned true.
            DepartedError: The session was closed.
        """
        patience = Patience(self.options.name, self.waits_for, timeout_s)
        found = Boundary()
        while True:
            found = self._carry_out(found)
            with self._changed:
                if self._closing.is_set():
                    raise DepartedError("this outer session was closed")
                if self._error is not None:
                    raise self._error
                if done() and not self._todo:
                    return found
                self._changed.wait_for(
                    lambda: bool(self._todo or self._error) or done() or self._closing.is_set(), _LOOK_S
                )
            if not done():
                patience.look()

    def waits_for(self) -> str:
        """Returns in words the event for which this cluster waits before it trains on or may leave."""
        attendant = self._life.attendant
        if attendant is not None and attendant.trouble:
            return f"the parameter server at {','.join(self.options.endpoints)}: {attendant.trouble}"
        return self._life.machine.waits_for

    def _carry_out(self, found: Boundary) -> Boundary:
        """Carries out, in order, the effects that wait for the loop's thread; returns `found` with their outcome
        added.
        """
        self._feed(self._life, cl.AtRest(), resting=True)
        while True:
            with self._changed:
                if not self._todo:
                    if self.base != NO_VERSION:  # an epoch may have ended without another version
                        self.progress = self._life.machine.job
                    return found
                effect, part = self._todo.popleft()
            life = self._life
            found = self._effects.carry_out(effect, life.machine, part, found)
            match effect:
                case cl.Freeze(push, base):
                    self._encode(life, push, base)
                case cl.Adopt(outright=True) | cl.TakeLast():
                    self._take_over(claimed=True)
                case cl.Adopt():
                    self._take_over()
                case cl.Over() as over:
                    self._end_of_life(over)

    def _encode(self, life: _Life, push: PushId, base: VersionId) -> None:
        def done(part: Part, manifest: str) -> bool:
            with self._changed:
                if life.over or life is not self._life:
                    return False
                self._model.pushes[push] = part
            self._feed(life, cl.Frozen(push, manifest))
            return push in self._model.pushes

        def failed(error: Exception) -> None:
            odd = StateError(f"push {push} could not be encoded: {error!r}")
            self.fail(error if isinstance(error, ChaosError) else odd)

        covered = life.machine.covering
        self._exchange.encode(push, base, covered, wanted=lambda: not life.over, done=done, failed=failed)

    def _take_over(self, *, claimed: bool = False) -> None:
        """Notes the job's progress with a version that was taken over; `claimed`: what was claimed is void."""
        with self._changed:
            self.progress = self._life.machine.job
            if claimed:
                self._claimed.clear()

    def _end_of_life(self, over: cl.Over) -> None:
        old = self._life
        if not over.again:
            self.over = over.reason
            if over.failed:
                raise put_out(self.options.name, over.reason, was_in=old.machine.was_in)
            return
        with self._changed:
            old.over = True
            self._life = _Life(self, old.machine.anew())
            self._todo.clear()
            self._claimed.clear()
            self._exchange.drop()
            for push in set(self._model.pushes) - set(self._life.machine.kept):
                self._exchange.free(push)
            self._exchange.anew(self._life.name)
        self._end(old)
        self._begin(self._life)

    @staticmethod
    def _end(life: _Life) -> None:
        """Ends an incarnation's stream; what it serves is served on."""
        life.over = True
        if life.attendant is not None:
            life.attendant.close()

    # ------------------------------------------------------------------ any thread

    def _begin(self, life: _Life) -> None:
        """Connects an incarnation to the leader."""
        life.attendant = Attendant(self.options, self._secret, self._settings.heartbeat_s, life, hosts=False)
        life.attendant.start()

    def happened(self, life: _Life, event: RankNews) -> None:
        """Takes news for the machine of an incarnation."""
        match event:
            case fx.Told(message):
                self._log.heard(message)
            case fx.Disconnected() if life.attendant is not None:
                self._log.away(life.attendant.trouble)
        self._feed(life, event)

    def fail(self, error: ChaosError) -> None:
        """Makes the loop's thread raise this error at its next boundary or wait."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _feed(self, life: _Life, event: cl.ClusterEvent, *, resting: bool = False) -> None:
        with self._changed:
            if life.over or life is not self._life:
                return
            try:
                effects = life.machine.on(event, resting=resting)
            except ValueError as error:
                self.fail(StateError(f"what cluster {self.options.name} was told contradicts what it holds: {error}"))
                return
            for effect in effects:
                self._apply(life, effect)
            self._changed.notify_all()

    def _apply(self, life: _Life, effect: cl.ClusterEffect) -> None:
        match effect:
            case fx.Say(message):
                if life.attendant is not None:
                    life.attendant.say(message)
            case cl.FetchVersion() | cl.ReachHolders() | fx.OuterNote():
                self._effects.carry_out(effect, life.machine, None, Boundary())
            case cl.Adopt(version) | cl.TakeLast(version):
                self._todo.append((effect, self._exchange.take(version)))
            case _:
                self._todo.append((effect, None))

    # ------------------------------------------------------------------ positions and rates

    def _free(self) -> tuple[int, tuple[Span, ...]] | None:
        """Returns the lowest epoch that has leased positions which the loop has not claimed, and these positions; None
        if there is none.
        """
        for epoch, spans in sorted(self._life.machine.free_spans().items()):
            if left := subtract(spans, self._claimed.get(epoch, ())):
                return epoch, left
        return None

    def _unclaim(self, covered: Covered) -> None:
        left = subtract(self._claimed.get(covered.epoch, ()), covered.spans)
        self._claimed[covered.epoch] = left
        if not left:
            del self._claimed[covered.epoch]

    def _measure(self, samples: int, steps: int, now: float) -> None:
        """Updates the moving averages of samples and steps trained per second; time spent waiting does not count."""
        self._rates.take(samples, steps, now - self._rested_at)
        machine = self._life.machine
        machine.rate, machine.step_rate = self._rates.samples_per_s, self._rates.steps_per_s

    # ------------------------------------------------------------------ threads

    def _sought(self) -> Sought | None:
        wanted = self._life.machine.fetching
        get = partial(self._exchange.fetch, wanted)
        return Sought(wanted, self._life, get) if wanted != NO_VERSION and self._exchange.holders else None

    def _missed(self, version: VersionId) -> None:
        self._feed(self._life, cl.Missed(version))

    def _landed(self, version: VersionId) -> None:
        self._feed(self._life, cl.Got(version))


def agreement_of(
    replica: Replica,
    options: ClusterOptions,
    settings: OuterSettings,
    *,
    length: int = 0,
    words: dict[str, str] | None = None,
) -> Agreement:
    """Returns the facts about this cluster's model, data and settings that must be equal in all clusters of the job.

    Args:
        replica: Part of this cluster's model that clusters exchange.
        options: Options of this cluster; codec, block and the kind of data are the job's.
        settings: Rules of the job.
        length: Positions of an epoch of the shared data; 0 where each cluster has its own.
        words: Further facts that must be equal, such as the seed or a tokenizer's hash.
    """
    codec_named(options.codec)
    fit = Fit(options.job, ",".join(options.endpoints)).number
    said = {
        "data": options.data,
        **({FIT: str(fit)} if fit > 1 else {}),
        **({TIED: json.dumps(replica.tied)} if replica.tied else {}),
        **(words or {}),
    }
    return Agreement(
        replica.specs,
        replica.averaged,
        options.block,
        options.codec,
        length,
        settings.words,
        tuple(sorted(said.items())),
    )


__all__ = ["OuterSession", "agreement_of"]
