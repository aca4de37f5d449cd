"""Runs outer sync around a member of strategy `chaos`, which is a rank of a cluster that is itself an elastic job.

Theory of operation. The inner job is an ordinary one of `ChaosStrategy`: its ranks share the cluster's data, come,
leave and die. Beside it each rank holds the whole cluster's part in the outer job (outer/cluster/elastic.py); the
commit of each step of the inner job moves that part on, alike at all ranks. While the cluster may not train, at the
start and when it waits for an answer, its ranks stay at the safe point between two batches and meet in small
collectives. Newcomers are let in there, too.

A newcomer gets the cluster's base, residual and pushes with the rest of the training state. Adopting a version changes
the parameters by more than gradients, so a replay of steps would miss it: newcomers come in by a pause.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import ConfigurationError, DeadlineError, UnsupportedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.signals import ExitSignals, Handler
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.participation import Footing
from chaos_lightning.member.training import least_batch, reduced_buffers
from chaos_lightning.outer.cluster.cluster_effects import Boundary, renew
from chaos_lightning.outer.cluster.elastic import ElasticCluster
from chaos_lightning.outer.cluster.leaving import Patience, cost, insist
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.server_start import others_in
from chaos_lightning.outer.cluster.session import agreement_of
from chaos_lightning.outer.cluster.strategy_options import DiLoCoOptions, build
from chaos_lightning.outer.exchange.vocabulary import OUTER
from chaos_lightning.outer.rules.types import HYPER
from chaos_lightning.planning import ledger, orders
from chaos_lightning.planning.batches import UNTOLD, Batches
from chaos_lightning.planning.tape import Tape
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.settings import EngineConfig
from chaos_lightning.strategies.fingerprint import words_of_run
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.loops import batches_begun, epoch_of, save_last_again, skip_validation, why_over
from chaos_lightning.strategies.outer_clock import JobClock
from chaos_lightning.strategies.session import FitHooks, FitSession

_log = logging.getLogger("chaos_lightning")

MEETING = "outer sync"
LET_GO_S = 3.0
"""Seconds that a rank which was asked to leave after its loop waits to be let go. If all ranks have waited longer, as
their scheduler is away, the cluster leaves as a whole."""
OTHERS_HOLD = "still waiting to be let go. To end now costs nothing as long as another rank stays, which holds the same"
CHECKPOINT = "checkpoint (ckpt_path)"
"""Name, among the words that clusters compare, of the checkpoint that a job goes on from."""
MOST_HYPER = 1 << 16
"""Most characters of hyperparameters that the job knows for exports; an export takes longer ones from a checkpoint
(`--like`)."""
SHARED_WORDS = ("data.seed", "data.unit", "data.length", "data.order")
"""Facts about the data on which ranks agree, and clusters, too."""


class OuterTerms:
    """Settings of outer sync that the strategy gives to the ranks of an elastic cluster.

    Args:
        options: Further options of the strategy.
        given: Arguments of `DiLoCoStrategy` that are settings, by name.

    Raises:
        ConfigurationError: The cluster has no name; a rank cannot make up one that all ranks share.

    Attributes:
        cluster: The cluster's settings.
        shared: Whether clusters share the data.
    """

    def __init__(self, options: DiLoCoOptions, given: Mapping[str, Any]) -> None:
        self.options, self.given = options, dict(given)
        if not self.given.get("name"):
            raise ConfigurationError(
                "DiLoCoStrategy(inner='chaos') needs name=, the cluster's, which is the same at all its ranks"
            )
        self.cluster = build(options, self.given)[1]
        self.shared = self.cluster.data == "shared"


def replica_of(module: Any) -> Replica:
    """Returns the tensors of a LightningModule that clusters exchange."""
    named = getattr(module, "chaos_buffers", ())
    return Replica.of_module(module, reduced_buffers(module, named, named_by="chaos_buffers"))


def words_of(trainer: Trainer, *, warns: bool = True) -> dict[str, str]:
    """Returns further values that must be equal in all clusters, by name: how far the loaded checkpoint had trained,
    the module's `chaos_words`, and the hyperparameters that distinguish the runs of a sweep.

    Args:
        trainer: Trainer in fit.
        warns: Whether to warn of values that cannot be compared.
    """
    loaded = trainer._checkpoint_connector._loaded_checkpoint
    module = trainer.lightning_module
    return {
        CHECKPOINT: f"of {loaded.get('global_step', 0)} steps, {loaded.get('epoch', 0)} epochs" if loaded else "none",
        **{f"chaos_words.{name}": str(word) for name, word in getattr(module, "chaos_words", {}).items()},
        **words_of_run(trainer, warns=warns),
        **_hyper_parameters(module),
    }


def _hyper_parameters(module: pl.LightningModule) -> dict[str, str]:
    """Returns the module's hyperparameters as JSON, with which `ps export` constructs the model. Left out: values
    that JSON cannot hold, and names in `chaos_own_hparams`.
    """
    own = set(getattr(module, "chaos_own_hparams", ()))
    held = {}
    for name, value in module.hparams_initial.items():
        text = _json(value)
        if text is not None and name not in own:
            held[name] = json.loads(text)
    text = json.dumps(held, sort_keys=True)
    return {HYPER: text} if held and len(text) <= MOST_HYPER else {}


def _json(value: object) -> str | None:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == value else None


def explained(refusal: str) -> str:
    """Returns the job's reason for refusing this cluster, with advice if the checkpoints differ."""
    if f"its {CHECKPOINT} is" not in refusal:
        return refusal
    return (
        f"{refusal}. A job goes on from one checkpoint, which all clusters are started with. Who joins a job that runs "
        "needs none: it takes the newest version, and its inner optimizer begins anew"
    )


def refuse_ranks(config: EngineConfig, data: str, terms: OuterTerms) -> None:
    """Raises UnsupportedError if the settings of the inner job do not work in a cluster of an outer job.

    Args:
        config: Configuration of the inner job's member.
        data: Data of the ranks: "shared" or "local".
        terms: Settings of outer sync.
    """
    if terms.shared and data != "shared":
        raise UnsupportedError(
            f"data={data!r} of the inner strategy is not supported where clusters share the data: ranks train what the "
            "cluster is leased. Leave it out there, or give DiLoCoStrategy(data='local')"
        )
    if config.join_by == "replay":
        raise UnsupportedError(
            "join_by='replay' is not supported by ranks of an elastic cluster: a version that is adopted is no "
            "function of gradients, so steps cannot be replayed across it. Use join_by='auto' or 'pause'"
        )


class ElasticPart(FitHooks):
    """Hooks of one fit whose Trainer is a rank of an elastic cluster. Only the training thread calls them.

    Args:
        trainer: Trainer whose fit this is.
        terms: Settings of outer sync.
    """

    replays = False  # a version is no function of gradients
    owns_result = False  # the outer job's server has it
    again = "the cluster's last rank stays until what was trained is durable"

    def __init__(self, trainer: Trainer, terms: OuterTerms) -> None:
        self._trainer, self._terms, self._shared = trainer, terms, terms.shared
        self.leave_on_signals = terms.options.leave_on_signals
        self._others = others_in(terms.cluster)
        """Whether other clusters were in the job before; counts until the server has let this one in."""
        self._cluster: ElasticCluster | None = None
        self._patience: Patience | None = None
        self._asked_at = 0.0
        """Monotonic time, s, at which this rank was first seen to be asked to leave after the loop; 0.0 if never."""
        self._closed = False
        self._epoch: int | None = None
        """Epoch of the job that the present pass goes over."""
        self._number: int | None = None
        self._clock: JobClock | None = None
        self._due: Header | None = None
        """Header of a committed step that the optimizer has yet to take; None if there is none."""
        self._over = False
        """Whether `finish` has run, in which this rank stays until the outer job is over."""

    @property
    def clock(self) -> JobClock:
        assert self._clock is not None
        return self._clock

    @property
    def cluster(self) -> ElasticCluster:
        assert self._cluster is not None, "this rank has not entered its job yet"
        return self._cluster

    # ------------------------------------------------------------------ coming in

    def loader(self, dataloader: Any, **options: Any) -> JobLoader:
        own = {} if (seed := self._terms.options.seed) is None else {"seed": seed}
        return super().loader(dataloader, **(options | own), tape=self.tape if self._shared else None)

    def tape(self) -> Tape | None:
        """Positions of the shared data that are leased to this cluster's ranks; None before this rank is in the
        cluster.
        """
        return self._cluster.tape if self._cluster is not None and self._cluster.founded else None

    def enter(self, fit: FitSession) -> None:
        engine, loader = fit.engine, fit.elastic
        terms, batch = self._terms, loader.batch * self._trainer.accumulate_grad_batches  # as far as the loader says
        settings, options = build(terms.options, terms.given, batch=batch)
        replica = replica_of(self._trainer.lightning_module)
        words = words_of(self._trainer, warns=False)  # the inner job's fingerprint does
        length = (loader.length(0) or 0) if self._shared else 0
        if length:
            words |= {"data.order_version": str(orders.VERSION)} | {
                name: word for name, word in loader.order_fingerprint.items() if name in SHARED_WORDS
            }
        agreement = agreement_of(replica, options, settings, length=length, words=words)
        events = EventLog.in_directory(options.log_folder, f"{options.name}.{engine.name}", role="cluster")
        batches = UNTOLD
        if length:
            least = loader.quota if loader.drops else min(loader.quota, least_batch(self._trainer.lightning_module))
            batches = Batches(loader.quota * self._trainer.accumulate_grad_batches, loader.quota, least)
        self._cluster = self.beside = ElasticCluster(replica, agreement, options, engine, events, batches)

    @property
    def words(self) -> dict[str, str]:
        cluster = self.cluster
        options = cluster.options
        said = hashlib.sha256(OUTER.encode(cluster.agreement)).hexdigest()[:16]
        return {
            "outer sync": f"cluster {options.name} of job {options.job} at {','.join(options.endpoints)}, "
            f"overlap {options.overlap}, ahead_steps {options.ahead_steps}, {said}"
        }

    def entered(self, fit: FitSession) -> None:
        engine = fit.engine
        assert engine.view is not None
        self.cluster.found(engine.view.chain, alone=engine.world_size == 1)
        self.cluster.begin(engine.member_id, first=engine.rank == 0)

    @property
    def writes(self) -> bool:
        """Whether this cluster is the oldest one in the job; the first rank of the oldest cluster logs and writes
        files.
        """
        machine = self._cluster.machine if self._cluster is not None and self._cluster.founded else None
        if machine is None or machine.incarnation is None:
            return not self._others
        return machine.oldest in (None, machine.incarnation)

    @property
    def run(self) -> str:
        """Id of the outer job, unique among all jobs; "" before this cluster was let in."""
        return self._cluster.machine.job_id if self._cluster is not None and self._cluster.founded else ""

    # ------------------------------------------------------------------ commits

    def says(self, logged: bytes) -> bytes:
        """Returns this rank's report to its cluster and the logged values that it hands over, joined into one
        payload; `split` separates them.
        """
        own = self.cluster.answer()
        return len(own).to_bytes(4, "little") + own + logged

    def said(self, fit: FitSession, header: Header) -> Sequence[bytes]:
        return [split(both)[1] for both in header.answers]

    def training_step(self, fit: FitSession, run: Callable[[], Any], batch: Any) -> Any:
        if fit.elastic.current is not None:
            self.cluster.used(fit.elastic.current.samples)
        return super().training_step(fit, run, batch)

    def stepped(self, header: Header) -> None:
        self._due = header

    def applied(self, fit: FitSession, output: Any) -> None:
        """Takes in a committed step of the cluster, and waits for samples if all leased ones are used. The wait also
        ends if the epoch is over (then the version to be validated holds all of it), or if this rank leaves.
        """
        due, self._due = self._due, None
        if due is None:
            return
        tape, trainer = self.cluster.tape, self._trainer
        told = trainer.global_step % max(1, trainer.log_every_n_steps) == 0
        loss = float(output) if told and isinstance(output, Tensor) and output.numel() == 1 else None
        spent = ledger.spent_spans(due.ledger, ledger.SHARED, tape.number) if tape is not None else ()
        answers = [split(both)[0] for both in due.answers]
        boundary = self.cluster.commit(fit.engine.contributors, answers, steps=1, spent=spent, loss=loss)
        self._take(boundary, in_batch=True)
        while fit.in_job and self.waits_for_samples:
            self.patient(waits=True)
            if not self.meet(fit, in_batch=True):
                return
            fit.check_departure(stepped=True)  # as with the step: what is kept is kept at the next safe point
        if fit.departed:
            return
        if self.cluster.ends and self._shared:
            skip_validation(self._trainer)
        fit.refit()

    def begin(self) -> None:
        """Makes Lightning's counters and schedules follow the outer job's progress from here on."""
        self._clock = JobClock(self._trainer)
        self._clock.begin()

    def clock_state(self) -> dict[str, Any]:
        return self.clock.manifest()

    def adopt(self, given: Mapping[str, Any]) -> None:
        self.clock.adopt(given)

    def begins_pass(self, loader: JobLoader) -> bool:
        """Makes the new pass iterate over the job's present epoch, if clusters share the data; returns whether they
        do. Skips epochs that other clusters finished while this cluster waited for its first samples.
        """
        if not self._shared:
            return False
        tape = self.cluster.tape
        assert tape is not None
        self._epoch, self._number = tape.epoch, tape.number
        missed = self.clock.first_epoch + tape.epoch - epoch_of(self._trainer)
        if missed > 0:
            self.clock.skip_epochs(missed)
            _call_callback_hooks(self._trainer, "on_train_epoch_start")
            _call_lightning_module_hook(self._trainer, "on_train_epoch_start")
        loader.set_epoch(tape.number)
        return True

    @property
    def waits_for_samples(self) -> bool:
        """Whether all leased samples of the present epoch are used, and the epoch is not known to be over."""
        tape = self.cluster.tape
        if tape is None or self.cluster.ends or self.epoch_over:
            return False
        return self.cluster.dry or (self._epoch is not None and tape.epoch > self._epoch)

    @property
    def epoch_over(self) -> bool:
        """Whether the version adopted last holds all of the present epoch."""
        return self._epoch is not None and self.cluster.machine.job.epoch > self._epoch

    def total(self) -> float | None:
        if not self._shared or self._cluster is None:
            return None
        return (self.epoch_over and batches_begun(self._trainer)) or math.inf  # 0 batches: the next epoch begins

    def committed(self, header: Header) -> None:
        if header.kind is not Kind.STEP:
            self.cluster.commit((), ())

    def wait(self, fit: FitSession) -> None:
        """Meets the other ranks again and again until the cluster may train."""
        while not (fit.departed or self.cluster.ends):
            self.patient(waits := self.cluster.waits)
            if not waits:
                tape = self.cluster.tape
                if tape is not None and self._number not in (None, tape.number):  # the present pass is on another one
                    fit.loader.restart()
                return
            if not self.meet(fit) and fit.member.footing is Footing.VOID:
                fit.come_in()
            fit.let_others_in()
        self.ended |= not fit.departed

    def meet(self, fit: FitSession, *, in_batch: bool = False) -> bool:
        """Holds one meeting of the ranks while the cluster may not train; returns whether this rank took part.
        `in_batch`: the meeting follows a step within a batch, and is not between two batches.

        Raises:
            ConfigurationError: The server refuses this cluster.
        """
        cluster = self.cluster
        answers = fit.gather(MEETING, cluster.meeting(), lets_go=True)
        if answers is None:
            return False
        self._take(cluster.commit([member for member, _ in answers], [said for _, said in answers]), in_batch=in_batch)
        if cluster.over and not cluster.base.number:  # the cluster was never let in
            raise ConfigurationError(explained(cluster.over))
        return True

    def _take(self, boundary: Boundary, *, in_batch: bool) -> None:
        renew(self._trainer.optimizers, boundary)
        self.clock.put(self.cluster.reckoned, in_batch=in_batch, back=boundary.outright)

    def patient(self, waits: bool) -> None:
        """Reports what the cluster waits for, and gives up after `patience_s` (before the first version:
        `start_timeout_s`). If the cluster does not wait (`waits`), the time starts anew at the next wait.

        Raises:
            DeadlineError: The cluster has waited for longer.
        """
        if not waits:
            self._patience = None
            return
        options = self.cluster.options
        if self._patience is None:
            limit_s = options.patience_s if self.cluster.base.number else self._terms.options.start_timeout_s
            self._patience = Patience(options.name, self.cluster.waits_for, limit_s)
        self._patience.look()

    # ------------------------------------------------------------------ what is judged

    def show_base(self) -> None:
        """Sets the parameters to those of the version adopted last, until `show_own`."""
        if self._cluster is not None and not self._closed and self.cluster.founded:
            self.cluster.show_base()

    def show_own(self) -> None:
        """Sets the parameters back to the values that are trained. Idempotent."""
        if self._cluster is not None:
            self.cluster.show_own()

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the model's state dict with the version adopted last, so that a checkpoint holds parameters that
        all clusters have.
        """
        shows = self._cluster is not None and self.cluster.shows_base
        self.show_base()
        try:
            return {n: v.clone() if isinstance(v, Tensor) else v for n, v in make().items()}
        finally:
            if not shows:
                self.show_own()

    # ------------------------------------------------------------------ the end

    def fenced(self) -> None:
        self._due = None
        self.cluster.forget()

    def finish(self, fit: FitSession) -> None:
        """Pushes the remaining steps once the loops of all ranks are over, and waits until the outer job has ended or
        the cluster has left. If the job has ended, this rank then has its last version.

        Raises:
            DeadlineError: The cluster was to leave, and could not within `patience_s`.
        """
        if self._over or not fit.entered:
            return
        fit.refuse_void()
        if self.through and fit.member.footing is Footing.ALONE:
            fit.member.go(Footing.IN)
        if not fit.in_job:
            return
        self.through = self._over = True
        self._patience = None
        self.cluster.finish(why_over(self._trainer))
        while not self.cluster.over:
            self._await_end(fit.engine)
            if not self.meet(fit) or self._goes(fit):
                break
        else:
            self.clock.put(self.cluster.reckoned, in_batch=False, back=True)
        fit.refuse_void()
        if not fit.departed:
            save_last_again(self._trainer)

    def _goes(self, fit: FitSession) -> bool:
        """Lets newcomers in after a meeting of ranks whose loops are over; returns whether this rank is out of the
        job. When the last rank leaves, the cluster leaves.
        """
        if not self.cluster.over:
            fit.let_others_in()
        elif fit.engine.out:
            fit.member.depart()
        return not fit.in_job

    def _await_end(self, engine: Engine) -> None:
        """Checks how long this cluster has waited for the end of the job; if it is finished long before the others, it
        asks to leave.

        All ranks lose patience at about the same time, and each asks: the first rank's word counts, and any rank may be
            the first. From then on each waits as long again.

        Raises:
            DeadlineError: The second wait was in vain, too.
        """
        if engine.leaving:
            self._asked_at = self._asked_at or time.monotonic()
            self.cluster.held = time.monotonic() - self._asked_at > LET_GO_S
        try:
            self.patient(waits=True)
        except DeadlineError as error:
            if self.cluster.leaves:
                raise
            _log.warning("%s; this cluster is through, so it leaves, with %s", error, self.cluster.base)
            self._patience = None
            self.cluster.leave()

    def leave(self) -> None:
        """Takes the cluster out of the job when its last rank leaves, once all pushed steps are durable."""
        self._patience = None
        self.cluster.leave()
        while not self.cluster.over:
            self.patient(waits=True)
            self.cluster.alone()

    def exit_signals(self, first: Handler, last: Callable[[], bool]) -> ExitSignals:
        """Returns signal handlers: the first signal calls `first`, the second prints what would be lost by ending
        now, the third ends the process.
        """

        def again(number: signal.Signals, frame: FrameType | None) -> None:
            insist(signals, number, lambda: cost(at_risk()) if last() else OTHERS_HOLD)

        def at_risk() -> int:
            return self.cluster.machine.at_risk if self.cluster.founded else 0

        signals = ExitSignals(first, again=again)
        return signals

    def close(self) -> None:
        """Ends this rank's part in the cluster; the parameters are then the trained ones. Idempotent."""
        self.show_own()
        self._closed = True
        if self._clock is not None:
            self._clock.end()
        if self._cluster is not None:
            self._cluster.close()


def split(both: bytes) -> tuple[bytes, bytes]:
    """Splits what `ElasticPart.says` has joined into its two payloads; both are empty if the rank sent nothing."""
    end = 4 + int.from_bytes(both[:4], "little")
    return both[4:end], both[end:]
