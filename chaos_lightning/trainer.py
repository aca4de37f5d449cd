"""Offers the API of the Chaos paper (Listings 1 and 2) to plain PyTorch loops, based on the same engine as the
Lightning strategy.

    with Trainer() as trainer:
        for batch in trainer.prepare(model, optimizer, loader, epochs=3, clip_norm=1.0):
            optimizer.zero_grad()
            loss = ...
            trainer.backward(loss)
            trainer.update()
            trainer.check_state_replication()
            if capture_exit_event():
                trainer.request_node_exit()
                break

Theory of operation. `prepare` joins the job (and receives the others' state), then yields this member's batches of the
shared data; until `close`, the process switches threads after 0.5 ms (`sys.setswitchinterval`). `update` averages
gradients over all members, clips the average and steps the optimizer. A member that was put out (it froze) joins again
inside `update`, which then steps nothing.

Each batch has one `update`, since the other members wait for it: a loop that asks for the next batch without it gets an
error. A batch that has an `update` and no backward pass weighs nothing, and its samples count as used. While
`trainer.idle` is true, no samples were left for this member, and the batch is only a stand-in: its gradient weighs
nothing, and a loop that goes on to the next batch without `update` takes part all the same.

With `accumulate=N` a step is made of N batches of each member: `update` returns whether it has stepped. Each loss
counts by its samples, which `trainer.backward` sees to. It also scales the loss where a `scaler` is given. With
`batch=fixed` a step is made of as many batches as this member's share of it needs; after a recovery `update` returns
False, `trainer.began_again` is true, and the batches of the step's new share follow (pipeline/plain_shares.py).

All members make the calls that they make together in the same order: `update`, then `gather` and `save`, and then
`check_state_replication`. Newcomers come in at the last one, and go on with the next batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from chaos_lightning.collectives.canonical import run_words
from chaos_lightning.collectives.hyper import default_words, hyper_words, scaled
from chaos_lightning.collectives.layout import Section
from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.data.parts import part_of
from chaos_lightning.data.source import BatchFacts
from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import (
    ConfigurationError,
    DepartedError,
    DisagreementError,
    FencedError,
    UnsupportedError,
)
from chaos_lightning.machine.signals import ExitSignals, aside, say
from chaos_lightning.machine.units import duration
from chaos_lightning.member import checkpoints, training
from chaos_lightning.member.drift import StateComparison
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.keeping import LoadedCheckpoint
from chaos_lightning.member.micro_batches import MicroBatches
from chaos_lightning.member.participation import Footing, Participation
from chaos_lightning.member.process_group import warn_who_asks
from chaos_lightning.pipeline.hooked import alone
from chaos_lightning.pipeline.plain_shares import PlainShares
from chaos_lightning.planning.batch import MEMBER, samples_of_rate
from chaos_lightning.planning.ledger import epoch_of
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.replication.access import ModuleState, Stateful, module_extra
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.replication.replay import NEVER, ModuleReplay
from chaos_lightning.replication.saving import put_in_place, save_for_all, saved_nbytes
from chaos_lightning.settings import EngineConfig
from chaos_lightning.variables import warn_of_unknown

_log = logging.getLogger("chaos_lightning")


class _Wish:
    """Record of the user's wish to end this process: the first signal is noted, the second one ends the process at
    once.

    There is one for the process: `capture_exit_event` asks it without a Trainer.
    """

    def __init__(self) -> None:
        self._signals: ExitSignals | None = None
        self._waits: Engine | None = None

    @property
    def seen(self) -> str:
        """Name of the first signal; "" if none has come, or training goes on for a while (`_waits_s`)."""
        asked = self._signals.asked if self._signals is not None else None
        return asked.name if asked is not None and not self._waits_s(asked) else ""

    @staticmethod
    def _waits_s(number: signal.Signals) -> float:
        """Returns the seconds for which training goes on after a signal, as the setting `notice` says."""
        return max((t.engine.config.notice_plan.waits_s(number.name) for t in list(_open.values())), default=0.0)

    def watch(self) -> None:
        """Installs the signal handlers, unless they are installed."""
        if self._signals is None:
            self._signals = ExitSignals(self._end_wait)
            self._signals.install()

    def forget(self) -> None:
        """Restores the former signal handlers, and forgets the signal that came."""
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    @contextlib.contextmanager
    def end_the_wait(self, engine: Engine) -> Iterator[None]:
        """Context manager in whose block a signal, even an earlier one, makes the member leave, so that waits end."""
        self._waits = engine
        try:
            if self.seen:
                aside(engine.leave, f"signal {self.seen}")
            yield
        finally:
            self._waits = None

    def _end_wait(self, number: signal.Signals, frame: FrameType | None) -> None:
        wait_s = self._waits_s(number)
        when = f"in {duration(wait_s)}" if wait_s else "from here on"
        if any(trainer.shares is not None for trainer in list(_open.values())):
            when += ", once the others do this member's share"
        say(f"{number.name}: capture_exit_event() is true {when}; once more ends at once")
        follows = [e for t in list(_open.values()) if (e := t.engine).config.notice_plan.on_signal(number.name, 0.0)]
        for engine in follows or filter(None, [self._waits]):
            aside(engine.heed, number.name)


_wish = _Wish()


def capture_exit_event() -> bool:
    """Returns whether this node is asked to leave: Ctrl+C, SIGTERM or SIGHUP came since the Trainer was made, or a
    notice is due (Listing 2). With `batch=fixed` it asks the others first, and is true once they need this member's
    share of a step no more.
    """
    trainers = list(_open.values())
    if not (_wish.seen or any(trainer.engine.noticed for trainer in trainers)):
        return False
    free = [trainer.may_stop() for trainer in trainers]
    return all(free)


class Trainer:
    """Member of a job, for a plain training loop.

    Args:
        settings: Fields of `EngineConfig` (endpoint, job, name, min_nodes, ...); the environment fills the rest in.
    """

    def __init__(self, **settings: Any) -> None:
        _close_what_was_left_open()
        warn_of_unknown()
        alone("chaos_lightning.trainer.Trainer")
        self.engine = Engine(EngineConfig.build(settings))
        self._state: ModuleState | None = None
        self._optimizer: Optimizer | None = None
        self._loader: JobLoader | None = None
        self.shares: PlainShares | None = None
        """This member's shares of steps whose batch has a fixed size; None: it adds a batch of its own."""
        self._extra = False
        self._current = True
        """Whether the state is the job's: no more once others step while this member leaves and cannot follow."""
        self._awaited = False
        self._closed = False
        self._comparison = StateComparison(self.engine)
        self._clip = training.Clipping()
        self._scaler: GradScaler | None = None
        self._scaled_for = samples_of_rate(self.engine.config.lr_scaling)
        self._member = Participation(self._put_out, self._left, self.engine)
        self._start = checkpoints.Start(self._member.checkpoints)
        self._let_in = False
        """Whether newcomers came in with this batch, or could have: they take part in calls from the next batch on."""
        self._open = False
        """Whether the present batch has had no `update` yet."""
        self._micro_batches = MicroBatches()
        self._switch_as_before: Callable[[], None] = lambda: None
        self._asks_as_before = warn_who_asks(
            lambda: self.engine.world_size, "trainer.rank == 0 (or trainer.world_size)"
        )
        _open[threading.get_ident()] = self
        _wish.watch()

    # ------------------------------------------------------------------ facts

    @property
    def rank(self) -> int:
        return self.engine.rank

    @property
    def world_size(self) -> int:
        return self.engine.world_size

    @property
    def step(self) -> int:
        """Number of committed optimizer steps, including those before the checkpoint from which the job resumed."""
        return self._start.step + self.engine.header.step

    @property
    def idle(self) -> bool:
        """Whether the present batch has no samples of this member and is only a stand-in."""
        return self._current_batch is not None and self._current_batch.idle

    @property
    def began_again(self) -> bool:
        """Whether the last `update` has dropped what this member had computed of its step, since the members have
        changed: the step begins again, with the next batch. Only with `batch=fixed`.
        """
        return self.shares is not None and self.shares.began_again

    @property
    def _current_batch(self) -> BatchFacts | None:
        if self.shares is not None:
            return self.shares.current
        return self._loader.current if self._loader is not None else None

    def _present(self, call: str) -> BatchFacts:
        """Returns the facts about the present batch; raises ConfigurationError if there is none (`call` is named in the
        text).
        """
        if self._loader is None:
            raise ConfigurationError(f"{call}: call prepare() first")
        if self._current_batch is None:
            raise ConfigurationError(f"{call} belongs into the loop over prepare()'s batches")
        return self._current_batch

    # ------------------------------------------------------------------ the loop

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        *,
        epochs: int = 1,
        data: Literal["shared", "local"] = "shared",
        seed: int = 0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        scaler: GradScaler | None = None,
        resume: str | os.PathLike[str] | None = None,
        extra: Mapping[str, Stateful | nn.Module] | None = None,
        reduced_buffers: Sequence[str] = (),
        loaded: bool | None = None,
        hparams: Mapping[str, Any] | None = None,
        own_hparams: Sequence[str] = (),
    ) -> Iterator[Any]:
        """Joins the job, then yields this member's batches until the epochs are over.

        If SIGINT, SIGTERM or SIGHUP comes while this waits for the job, the member leaves, and there are no batches
        (`capture_exit_event`).

        Args:
            model: Model, on one device.
            optimizer: Optimizer of all trained parameters.
            loader: The user's DataLoader, written as for one machine.
            epochs: Passes over the data.
            data: "shared": all members hold the same data set; "local": each has its own.
            seed: Seed of the order of samples; equal on all members.
            accumulate: Batches of each member per step, not with `batch=fixed`; with more than one `backward` takes the
                place of `loss.backward()`. At the end of an epoch a step is made of those that are left.
            clip_norm: Bound for the norm of the averaged gradients, as of `torch.nn.utils.clip_grad_norm_`.
            clip_value: Bound for each number in them, as of `torch.nn.utils.clip_grad_value_`.
            scaler: Gradient scaler for float16: `backward` scales losses with it, and `update` steps through it. Its
                state travels with the training state, and newcomers come in by a pause.
            resume: File that `save` has written, which the job goes on from. A member that joins a running job needs
                none; the others' state replaces what it has loaded.
            extra: Further state that newcomers receive (schedulers, averaged copies).
            reduced_buffers: Names of buffers that forward passes change (BatchNorm's are found by themselves).
            loaded: Whether model and optimizer hold a checkpoint. A state that the last member kept (`on_last_exit`)
                replaces that only if it goes on from the file of `resume` (and `resume_from` is "newest"). By default
                it is so with `resume`, or if the optimizer's state has steps; weights alone may be the beginning of a
                training.
            hparams: Hyperparameters of this run beside the optimizer's defaults, such as `vars(args)`. A member of
                another run, as of a sweep, is refused, with the name of what differs (docs/compat.md).
            own_hparams: Names of hyperparameters, and of the model's layers, that may differ between machines.

        Raises:
            ConfigurationError: These arguments do not fit each other, or the file of `resume` does not fit them.
            StateError: The file of `resume` is damaged.
        """
        if self._closed:
            raise ConfigurationError("this Trainer is closed; make a new one (in a notebook, run its cell again)")
        if self._state is not None:
            raise ConfigurationError(
                "prepare() was called before; one Trainer trains one model. Make a new Trainer (in a notebook, run its "
                "cell again), which closes this one"
            )
        if accumulate < 1:
            raise ConfigurationError(f"accumulate={accumulate}; expected 1 or more batches per step")
        rule = self.engine.config.batch
        if accumulate > 1 and rule != MEMBER:
            raise ConfigurationError(
                f"accumulate={accumulate} beside batch={rule!r}: a step has the samples that `batch` names, in as many "
                "batches as members need; leave accumulate at 1 and take batch=fixed:N, with N the loader's batch "
                "times what you accumulated"
            )
        self._clip = training.Clipping(clip_norm, clip_value)
        refuse(model, optimizer)
        named = _trained(model, optimizer)
        buffers = training.reduced_buffers(model, reduced_buffers, named_by="prepare(reduced_buffers=...)")
        engine = self.engine
        options: dict[str, Any] = {"mode": data, "seed": seed, "source": engine, "least": training.least_batch(model)}
        elastic: JobLoader
        if rule == MEMBER:
            elastic = ElasticLoader(loader, **options)
        else:
            self.shares = PlainShares(engine, loader, **options)
            elastic = self.shares.loader
        state = ModuleState(model, optimizer, self._extra_state(extra, scaler))
        found = None
        if resume is not None:
            found = checkpoints.restore(checkpoints.read(Path(resume)), Path(resume), state, elastic)
        sums = self.shares.sums if self.shares is not None else None
        self._micro_batches = MicroBatches(named, accumulate, scaler, buffers, sums)
        self._state, self._optimizer, self._loader, self._scaler = state, optimizer, elastic, scaler
        self._extra = bool(extra or scaler is not None or module_extra(model))
        self._switch_as_before = training.switch_quickly()
        engine.prepare(sections=[Section("optimizer 0", named)], buffers=buffers)
        if self.shares is not None:
            self.shares.attach(model, scales=scaler is not None)
        if loaded is None:
            loaded = resume is not None or has_stepped(optimizer)
        words = {
            "epochs": str(epochs),
            "extra state": ", ".join(f"{name} {type(value).__name__}" for name, value in sorted((extra or {}).items())),
            **({"training data": part_of(getattr(loader, "dataset", None))} if data == "shared" else {}),
            **run_words(model, {"hyperparameter": hparams or {}}, own_hparams),
            **({"lr_scaling": engine.config.lr_scaling} if self._scaled_for else {}),
        }
        self._join(state, elastic, accumulate, words, (found or LoadedCheckpoint()) if loaded else None)
        return self._batches(elastic, state, epochs)

    def _join(
        self,
        state: ModuleState,
        loader: JobLoader,
        accumulate: int,
        words: dict[str, str],
        loaded: LoadedCheckpoint | None,
    ) -> None:
        """Waits until this member is in the job; if it is asked to leave before that, marks it as departed."""
        engine, scaler, resumed_at = self.engine, self._scaler, self._start.step
        (optimizer,) = state.optimizers

        def enter() -> None:
            engine.join(
                fingerprint={
                    **loader.order_fingerprint,
                    **default_words([optimizer]),
                    "optimizer": type(optimizer).__name__,
                    "clipping": str(self._clip),
                    "loss scaling": type(scaler).__name__ if scaler is not None else "none",
                    **words,
                },
                quota=loader.quota,
                accumulate=accumulate,
                state=state,
                replay=ModuleReplay(state, self._clip, scaled_for=self._scaled_for),
                loaded=loaded,
                batch=self.shares.batch if self.shares is not None else "",
            )
            self._entered(loader, resumed_at)
            if not self._member.departed:
                self._member.go(Footing.IN)

        with _wish.end_the_wait(engine):
            self._member.come_in(enter)

    def _extra_state(
        self, extra: Mapping[str, Stateful | nn.Module] | None, scaler: GradScaler | None
    ) -> dict[str, Stateful | nn.Module]:
        """Returns the state that newcomers receive apart from model and optimizer: the user's, the job's start, the
        scaler.
        """
        own: dict[str, Stateful] = {checkpoints.KEY: self._start}
        if scaler is not None:
            own["scaler"] = scaler
        for name, value in (extra or {}).items():
            if own.get(name, value) is not value:
                raise ConfigurationError(f"extra={{{name!r}: ...}}: that name is taken; choose another one")
        return {**(extra or {}), **own}

    def _entered(self, loader: JobLoader, resumed_at: int) -> None:
        """Sets the loader to the job's position in the data after joining, as the state (from a file or other members)
        states it.

        Raises:
            ConfigurationError: The job has fewer steps than the checkpoint that this member has loaded.
        """
        engine, start = self.engine, self._start
        self._member.stepped = (engine.header.step, engine.header.hash)
        if self.step < resumed_at:
            raise ConfigurationError(
                f"the checkpoint of resume= is of step {resumed_at}, and the job that this member has joined is at "
                f"step {self.step}: what was trained would be lost. Start the member that has the file first, or all "
                "with the file, or end that job"
            )
        if start.data is not None:
            loader.load_state_dict(start.data)
            if engine.role == "founder" and not engine.resumed:
                engine.events.emit("resumed", step=start.step, ledger=loader.ledger.streams)
                _log.info("job %s goes on from step %d of a checkpoint", engine.config.job, start.step)
        if engine.out:  # it came when the job was finished
            self._member.depart()

    def _batches(self, loader: JobLoader, state: ModuleState, epochs: int) -> Iterator[Any]:
        def stands() -> int:
            return max(loader.epoch, epoch_of(self.engine.header.ledger, loader.stream) or 0)

        member = self._member
        epoch = stands() if not member.departed else epochs
        try:
            while epoch < epochs and not member.departed:
                loader.set_epoch(epoch)
                training.tell_epoch(self.engine, loader, epoch)
                for batch in loader if self.shares is None else self._shared(self.shares, state):
                    self._begin(state)
                    if member.departed:
                        return
                    yield batch
                    self._settle_batch()
                    if member.out:
                        break
                if member.footing is Footing.VOID:
                    member.go(Footing.IN)
                    epoch = max(epoch, stands())
                else:
                    epoch += 1
        finally:
            self._let_in = False  # a member that comes in from here on does not run this loop

    def _shared(self, shares: PlainShares, state: ModuleState) -> Iterator[Any]:
        """Yields this member's pieces of one step of the epoch after the other."""
        for step in shares.loader:
            self._comparison.take(state)
            with self._slot():
                shares.begin(step, self.step + 1, lambda: hyper_words(state.optimizers), self._comparison.hash)
            yield from shares.turns()
            if self._member.out:
                return

    def _begin(self, state: ModuleState) -> None:
        """Begins a batch before the loop gets it: determines its weight, and prepares to send gradients if it ends a
        step.
        """
        current = self._present("the loop")
        self._let_in, self._open = False, True
        if self.shares is not None:
            self._micro_batches.begin(float(current.samples), last=current.last)
            return
        if current.first:
            self._comparison.take(state)
        # Without a known view no samples were assigned to this member.
        view = self.engine.ruling_view
        share = current.samples / view.members[0].quota if view is not None else 0.0
        self._micro_batches.begin(share, last=current.last)
        if not current.last:
            return
        total = self._micro_batches.total
        # Where all members leave, no header lets them go: the release comes at any moment.
        with self._member.slot(), contextlib.suppress(FencedError):  # update() meets it again and joins anew
            self.engine.arm(coefficient=total, empty=total == 0)

    def _settle_batch(self) -> None:
        """Calls `update` for a loop that asks for the next batch after one without samples: other members wait for it.

        Raises:
            ConfigurationError: A batch with samples had no `update`.
        """
        if not self._open or self._member.out:
            return
        if not self.idle:
            raise ConfigurationError(
                "the next batch was asked for, and the present one had no trainer.update(): all members wait for each "
                "other's. Write `trainer.update()` after the backward pass, in place of `optimizer.step()`, for every "
                "batch, also before `continue`; a batch that had no backward pass then weighs nothing"
            )
        if self.update() and self._optimizer is not None:
            self._optimizer.zero_grad()
        self.check_state_replication()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Runs the backward pass of the present batch, in place of `loss.backward()`; does nothing if the batch is
        idle.

        Args:
            loss: Mean loss over the batch, neither divided by `accumulate` nor scaled by the `scaler`.
            options: Options of `Tensor.backward`.
        """
        if self._member.out:
            return
        self._present("backward()")
        if not self._open:
            raise ConfigurationError("backward() after update(): this batch is in its step already")
        self._micro_batches.backward(loss, **options)
        self.engine.losses.add(loss, self._micro_batches.weight)

    def update(self) -> bool:
        """Averages the gradients over all members, clips the average, and steps the optimizer.

        A batch that had no backward pass weighs nothing: others' gradients make the step, and its samples count as
        used.

        Returns:
            Whether a step was made. With `accumulate=N` or `batch=fixed` the last batch of each step makes it, unless
            the step begins again (`began_again`). None was made if this member was out and has joined again; the next
            batch is a fresh one. A step that the scaler leaves out, since
            gradients overflowed, counts: all members leave it out.
        """
        if self._member.out:
            return False
        current = self._present("update()")
        if not self._open:
            raise ConfigurationError("update() was called twice for one batch; it makes the batch's step")
        skipped = self._micro_batches.end(last=current.last)
        self._open = False
        if self.shares is None and not current.last:
            return False
        assert self._optimizer is not None
        header = None
        with self._slot():  # the others may be too few, and the step may never come
            stepped = self._average(self._optimizer, skipped=skipped)
            if stepped is not None:
                self._comparison.settle(stepped)
                header = stepped
                self._member.stepped = (header.step, header.hash)
        if header is None:
            return False
        self._micro_batches.forget()
        self.engine.losses.tell(header.step)
        with scaled(self._optimizer, header.lr_factor(self._scaled_for)):
            self._apply(header, self._optimizer)
        self._micro_batches.stepped()
        return True

    def _average(self, optimizer: Optimizer, *, skipped: bool) -> Header | None:
        """Averages the step's gradients over all members; returns its header, None if the step is not over here.

        Args:
            optimizer: The optimizer that is to step.
            skipped: Whether the present batch had no backward pass.
        """
        if self.shares is not None:
            header = self.shares.update(skipped=skipped)
            if self.shares.began_again:
                self._micro_batches.forget()
                self.engine.losses.tell(0)
            return header
        assert self._loader is not None
        weight = self._micro_batches.total
        if skipped:  # armed with its weight; nothing of it was sent
            self.engine.arm(coefficient=weight, empty=weight == 0)
        return self.engine.step(
            weight=weight,
            coefficient=weight,
            spent=self._loader.spent(),
            hyper=hyper_words([optimizer]),
            order=self._loader.order,
            state_hash=self._comparison.hash,
        )

    def _apply(self, header: Header, optimizer: Optimizer) -> None:
        """Clips the averaged gradients and steps the optimizer, through the scaler if there is one; equal at all
        members.
        """
        scaler = self._scaler
        if scaler is None:
            self._clip(optimizer)
            optimizer.step()
        elif header.total_weight > 0:  # else there are no gradients, and a scaler fails
            scaler.unscale_(optimizer)
            self._clip(optimizer)
            scaler.step(optimizer)
            scaler.update()

    # ------------------------------------------------------------------ together

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all members, in rank order. All members must call this at the same place, idle ones
        too.

        A member that is out of the job, or has just joined again, gets its own value alone.

        Args:
            value: Numbers, texts, containers of these, and tensors. Those of all members together may have 60 MiB.
        """
        caller = sys._getframe(1).f_code
        answers = self._gather(f"gather at {os.path.basename(caller.co_filename)}:{caller.co_name}", value)
        return [value] if answers is None else list(answers.values())

    def _gather(self, name: str, value: Any) -> dict[str, Any] | None:
        """Returns the values by member id, in rank order, without those of members that leave; None if this member is
        out or has just joined again.
        """
        if self._state is None:
            raise ConfigurationError("call prepare() first")
        if self._member.out:
            return None
        if self.shares is not None and self.shares.within:
            raise ConfigurationError(
                "gather() within a step of batch=fixed: members have different numbers of batches in it. Call it only "
                "where update() has returned True"
            )
        if self._let_in:
            raise ConfigurationError(
                "gather() and save() belong before check_state_replication(), also where `break` follows: newcomers "
                "come in there and go on with the next batch, so they would not take part"
            )
        answers = None
        with self._slot():
            answers = self.engine.gather(name, encode_payload(value))
        if answers is None:
            return None
        device = next(self._state.module.parameters()).device
        return {member: decode_payload(data, device) for member, data in answers if data}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint for `prepare(resume=...)`. All members call this, and one of them writes.

        The file replaces one that is there as a whole. `torch.load(path, weights_only=True)` reads it: "model" and
        "optimizer" are their `state_dict()`. A member that has left writes none, unless it was the last one.

        Args:
            path: Path of the file; its folder exists.

        Raises:
            ConfigurationError: This is called within a step.
            StateError: Another member was to write the file, and could not; or the file could not be read again.
        """
        state, loader, engine = self._state, self._loader, self.engine
        if state is None or loader is None:
            raise ConfigurationError("call prepare() first")
        if not self._member.out and not (loader.at_safe_point and not self._open):
            raise ConfigurationError(
                "save() belongs after update(); with accumulate=N or batch=fixed only where update() has returned "
                "True. In between gradients would be lost"
            )
        alone = self._member.footing is Footing.LAST
        writer = engine.member_id

        def exchange(name: str, value: Any) -> list[Any] | None:
            """Gathers a value from all members, and makes the oldest one that answered the writer, since an older one
            may be leaving.
            """
            nonlocal writer
            answers = self._gather(name, value)
            writer = next(iter(answers or ()), writer)
            return None if answers is None else list(answers.values())

        if not alone and exchange("barrier before saving", None) is None:  # it makes the last step stable
            why = "has left the job" if self._member.departed else "has just joined again"
            _log.warning("%s %s, so %s is not written here: the others save", engine.name, why, path)
            return
        target, (number, head) = Path(path), self._member.stepped
        checkpoint = checkpoints.content(state, loader, engine.config.job, self.step, head)

        def write() -> None:
            engine.events.emit("checkpoint", path=str(target), step=number, head=head)
            put_in_place(target, f"{self.step}-{head}", lambda beside: checkpoints.write(checkpoint, beside))

        save_for_all(
            str(target),
            lambda: saved_nbytes(checkpoint),
            engine.name,
            is_writer=lambda: writer == engine.member_id,
            write=write,
            exchange=exchange,
            stays_unsaved=lambda: self._member.out and not alone,
        )
        self._member.saved()

    def check_state_replication(self) -> None:
        """Admits members that wait to join, and makes the state available to them (Listing 1)."""
        state, current = self._state, self._current_batch
        if state is None or self._member.out:
            return
        within = self.shares.within if self.shares is not None else current is not None and not current.last
        self._let_in = True
        if within:
            return  # within a step, where nobody can come in
        with self._slot():
            self._member.let_others_in(state)

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """Context manager for a block that takes slots; marks this member as departed if a header lets it go."""
        with self._member.slot(), _wish.end_the_wait(self.engine):
            yield
            if self.engine.out:
                self._member.depart()

    def _left(self, stepped: bool) -> None:
        """Keeps the state in a file, if need be, after this member has left; only if it is the state at the last
        header.
        """
        if self._current:
            self._keep()
        self.engine.out = True

    def _keep(self, *, stuck: bool = False) -> None:
        if self._state is not None:
            self._member.keep(self._state, counted=self.step, stuck=stuck)

    def _put_out(self) -> None:
        """Joins the job again at once after this member was excluded; the loop continues with the next batch."""
        state, loader = self._state, self._loader
        assert state is not None
        assert loader is not None

        def enter() -> None:
            self.engine.rejoin(state)
            self._entered(loader, 0)

        if self._optimizer is not None:
            self._optimizer.zero_grad()  # a loop may keep what it has accumulated until it steps
        self.engine.losses.tell(0)
        self._micro_batches.forget()
        if self.shares is not None:
            self.shares.forget()
            self.shares.loader.give_up()
        with _wish.end_the_wait(self.engine):
            self._member.come_in(enter)

    def request_node_exit(self, reason: str = "") -> None:
        """Leaves the job in an orderly way: takes part in slots, without samples, until a header lets this member go
        (Listing 2).

        Meanwhile its state follows the others' by replay, for newcomers that may find no other donor. If steps cannot
        be replayed, or there is extra state that replay does not change, it hands its state out no more once the others
        have stepped.
        """
        engine, state = self.engine, self._state
        self._settle_open()
        engine.leave(reason or _wish.seen or engine.noticed or "the user asked")
        replay = ModuleReplay(state, self._clip) if state is not None and not self._extra else None
        follows = replay is not None and not replay.replayable()
        try:
            while engine.header.kind is not Kind.CLOSING and not self._member.may_go():
                if state is not None and self._current:
                    engine.serve(state)
                header = engine.step(weight=0.0, coefficient=0.0, yields=True)
                if header.kind is Kind.STEP:
                    self._current = self._current and follows
                    if replay is not None and self._current:
                        replay.replay(header)
                elif header.kind is Kind.BOUNDARY and state is not None and self._current:
                    engine.admit(header, state)
        except FencedError:
            engine.out = True
        except DepartedError:
            pass  # let go at once: nobody is left who would need another step
        if engine.header.kind is Kind.CLOSING and not engine.out:
            engine.finish(state if self._current else None)  # the others closed the job
            self._awaited = True
        self._member.depart()
        self._await_release()

    def may_stop(self) -> bool:
        """Returns whether this member may end its loop; if the others still need its share of each step
        (`batch=fixed`), asks to leave, and a later step's header lets it go.
        """
        if self.shares is None or not self._member.in_job:
            return True
        self.engine.leave(_wish.seen or self.engine.noticed)
        return self._member.may_go()

    def _settle_open(self) -> None:
        """Finishes the batch under way: completes its step if its gradients are being sent already, else contributes
        nothing.
        """
        if self.shares is not None:
            self.shares.drop()
            if not self._member.out:
                with contextlib.suppress(FencedError, DepartedError):
                    self.engine.arm(coefficient=0.0, empty=True)
        elif self._open and not self._member.out and self._present("request_node_exit()").last:
            if self.engine.sending:
                self.update()
            else:
                with contextlib.suppress(FencedError, DepartedError):  # the coming step meets them again
                    self.engine.arm(coefficient=0.0, empty=True)
        self._open = False

    def _await_release(self) -> None:
        """Waits until the other members no longer need this one's bytes, after a header has let it go."""
        if not self._awaited:
            self._awaited = True  # one deadline is enough where no scheduler is there to release anybody
            self.engine.wait_released()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends this member's part in the job at once. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for thread in [thread for thread, trainer in _open.items() if trainer is self]:
            del _open[thread]
        if self.shares is not None:
            self.shares.forget()
        if self._loader is not None:
            self._loader.close()
        self._micro_batches.close()
        self.engine.close()
        self._switch_as_before()
        self._asks_as_before()
        _wish.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._state is not None:
                self._end()
        except DisagreementError:
            self._keep(stuck=True)
            raise
        finally:
            if isinstance(error, DisagreementError):
                self._keep(stuck=True)
            self.close()

    def _end(self) -> None:
        """Finishes the job together with the other members, or waits for the release if this member has left."""
        if not self._member.departed:
            try:
                self.engine.finish(self._state)
                return
            except DepartedError:  # all were asked to leave after the last step
                self._member.depart()
        self._await_release()


_open: dict[int, Trainer] = {}
"""Trainers that are not closed, by the id of the thread that made them."""


def _close_what_was_left_open() -> None:
    """Closes a Trainer of this thread that was not closed, as after an interrupt in a notebook, since members would
    wait for it and its noted signal would end the next one.
    """
    before = _open.get(threading.get_ident())
    if before is not None:
        _log.warning("the Trainer of %s was never closed; it is now, since another one is made", before.engine.name)
        before.close()


def _trained(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Returns the model's parameters that the optimizer trains, with names, in the optimizer's order."""
    names = {id(p): n for n, p in model.named_parameters()}
    params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    unknown = [i for i, p in enumerate(params) if id(p) not in names]
    if unknown:
        raise ConfigurationError(f"the optimizer's parameter {unknown[0]} does not belong to the model")
    return [(names[id(p)], p) for p in params]


def refuse(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises UnsupportedError for a model or optimizer that cannot be trained in a job."""
    found = [f"{type(optimizer).__name__}: {why}" for kind, why in NEVER.items() if isinstance(optimizer, kind)]
    if training.is_sharded(optimizer):
        found.append(f"{type(optimizer).__name__}: {training.SHARDED}")
    for name, module in model.named_modules():
        words = f"{name or 'the model'} ({type(module).__name__})"
        found += [f"{words}: {kind.why}" for kind in training.UNSERVED if kind.found(module)]
    if found:
        raise UnsupportedError("prepare() does not support:\n" + "\n".join(f"- {line}" for line in found))


def has_stepped(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer has made steps; some optimizers have a state of zeros before the first step."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())
