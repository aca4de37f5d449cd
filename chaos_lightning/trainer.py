"""The API of the Chaos paper (Listings 1 and 2) for plain PyTorch loops, on the same engine as the Lightning strategy.

    with Trainer() as trainer:
        for batch in trainer.prepare(model, optimizer, loader, epochs=3):
            loss = ...
            loss.backward()
            trainer.update()
            trainer.check_state_replication()
            if capture_exit_event():
                trainer.request_node_exit()
                break

Theory of operation. `prepare` joins the job (and receives the others' state), then yields this member's batches of the
shared data; until `close`, the process switches threads after 0.5 ms (`sys.setswitchinterval`). `update` averages
gradients over all members and steps the optimizer. A member that was put out (it froze) joins again inside `update`,
which then steps nothing. A batch that `trainer.idle` marks stands in for "no samples left for me": its gradient weighs
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer

from chaos_lightning.collectives.hyper import default_words, hyper_words
from chaos_lightning.collectives.layout import Section
from chaos_lightning.data.loader import ElasticLoader
from chaos_lightning.errors import ConfigurationError, DepartedError, FencedError, UnsupportedError
from chaos_lightning.machine.signals import ExitSignals, aside
from chaos_lightning.member import training
from chaos_lightning.member.engine import Engine
from chaos_lightning.planning.ledger import epoch_of
from chaos_lightning.protocol.types import Kind
from chaos_lightning.replication.access import ModuleState, Stateful, module_extra
from chaos_lightning.replication.replay import NEVER, ModuleReplay
from chaos_lightning.settings import EngineConfig

_log = logging.getLogger("chaos_lightning")


class _Wish:
    """Of the user, that this process ends: the first SIGINT or SIGTERM is remembered, the second one ends it at once.

    One for the process: `capture_exit_event` asks without a Trainer.
    """

    def __init__(self) -> None:
        self._signals: ExitSignals | None = None
        self._waits: Engine | None = None

    @property
    def seen(self) -> str:
        """The signal's name; "" before."""
        asked = self._signals.asked if self._signals is not None else None
        return asked.name if asked is not None else ""

    def watch(self) -> None:
        """From here on signals are seen."""
        if self._signals is None:
            self._signals = ExitSignals(self._end_wait)
            self._signals.install()

    def forget(self) -> None:
        """Handlers are what they were, and what was seen is forgotten."""
        if self._signals is not None:
            self._signals.restore()
            self._signals = None

    @contextlib.contextmanager
    def end_the_wait(self, engine: Engine) -> Iterator[None]:
        """Waiting inside ends at the first signal, also at one that came before, once nobody needs this member."""
        self._waits = engine
        try:
            if self.seen:
                aside(engine.leave, f"signal {self.seen}")
            yield
        finally:
            self._waits = None

    def _end_wait(self, number: signal.Signals, frame: FrameType | None) -> None:
        if self._waits is not None:
            aside(self._waits.leave, f"signal {number.name}")


_wish = _Wish()


def capture_exit_event() -> bool:
    """Whether the user wants this node to leave: Ctrl+C or SIGTERM since the Trainer was made (Listing 2)."""
    return bool(_wish.seen)


class Trainer:
    """One member of a job, for a plain loop.

    Args:
        settings: Fields of `EngineConfig` (endpoint, job, name, min_nodes, ...); the environment fills the rest in.
    """

    def __init__(self, **settings: Any) -> None:
        self.engine = Engine(EngineConfig.build(settings))
        self._state: ModuleState | None = None
        self._optimizer: Optimizer | None = None
        self._loader: ElasticLoader | None = None
        self._extra = False
        self._fenced = False
        self._awaited = False
        self._proof = ""
        self._switch_as_before: Callable[[], None] = lambda: None
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
        """Optimizer steps that the job has committed."""
        return self.engine.header.step

    @property
    def idle(self) -> bool:
        """The present batch stands in for none: no samples were left for this member."""
        return self._loader is not None and self._loader.current is not None and self._loader.current.idle

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
        extra: Mapping[str, Stateful | nn.Module] | None = None,
        reduced_buffers: Sequence[str] = (),
        loaded: bool | None = None,
    ) -> Iterator[Any]:
        """Joins the job, then yields this member's batches until the epochs are spent.

        SIGINT or SIGTERM while this waits for the job: it leaves, and there are no batches (`capture_exit_event`).

        Args:
            model: On one device.
            optimizer: Of all trained parameters.
            loader: The user's DataLoader, written as for one machine.
            epochs: Passes over the data.
            data: "shared": all members hold the same data set; "local": each has its own.
            seed: Keys the order of samples; equal on all members.
            extra: Further state that newcomers receive (schedulers, averaged copies).
            reduced_buffers: Names of buffers that forward passes change (BatchNorm's are found by themselves).
            loaded: Model and optimizer hold a checkpoint, which no state that the last member kept (`on_last_exit`) may
                replace. None: if the optimizer's state has steps; weights alone may be what a training begins with.
        """
        if self._state is not None:
            raise ConfigurationError("prepare() was called before; one Trainer trains one model")
        refuse(model, optimizer)
        names = {id(p): n for n, p in model.named_parameters()}
        params = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        unknown = [i for i, p in enumerate(params) if id(p) not in names]
        if unknown:
            raise ConfigurationError(f"the optimizer's parameter {unknown[0]} does not belong to the model")
        buffers = training.reduced_buffers(model, reduced_buffers, named_by="prepare(reduced_buffers=...)")
        self._state = ModuleState(model, optimizer, extra)
        self._extra = bool(extra or module_extra(model))
        self._optimizer = optimizer
        engine = self.engine
        self._switch_as_before = training.switch_quickly()
        engine.prepare(sections=[Section("optimizer 0", [(names[id(p)], p) for p in params])], buffers=buffers)
        self._loader = elastic = ElasticLoader(loader, mode=data, seed=seed, source=engine)
        try:
            with _wish.end_the_wait(engine):
                engine.join(
                    fingerprint={
                        **elastic.order_fingerprint,
                        **default_words([optimizer]),
                        "optimizer": type(optimizer).__name__,
                        "epochs": str(epochs),
                    },
                    quota=elastic.quota,
                    accumulate=1,
                    state=self._state,
                    replay=ModuleReplay(self._state),
                    loaded=has_stepped(optimizer) if loaded is None else loaded,
                )
        except DepartedError:
            if not engine.leaving:
                raise
            engine.out = True  # it never was in: there are no batches
        return self._batches(elastic, self._state, epochs)

    def _batches(self, loader: ElasticLoader, state: ModuleState, epochs: int) -> Iterator[Any]:
        epoch = loader.epoch
        while epoch < epochs and not self.engine.out:
            loader.set_epoch(epoch)
            training.tell_epoch(self.engine, loader, epoch)
            for batch in loader:
                self._arm()
                if self.engine.out:
                    return
                self._proof = training.proof(self.engine, state)
                yield batch
                if self.engine.out:
                    return
                if self._fenced:
                    break
            if self._fenced:
                self._fenced = False
                epoch = max(epoch, epoch_of(self.engine.header.ledger, loader.stream) or 0)
            else:
                epoch += 1

    def _share(self) -> float:
        current, view = (self._loader.current if self._loader else None), self.engine.ruling_view
        if current is None:
            raise ConfigurationError("update() belongs into the loop over prepare()'s batches")
        # Nothing was assigned by a view that this member does not know.
        return current.samples / view.members[0].quota if view is not None else 0.0

    def _arm(self) -> None:
        share = self._share()
        try:
            with contextlib.suppress(FencedError):  # update() meets it again and joins anew
                self.engine.arm(coefficient=share, empty=share == 0)
        except DepartedError:  # where all members leave, no header lets them go: the release comes at any moment
            self.engine.out = True

    def update(self) -> bool:
        """Averages the gradients over all members and steps the optimizer.

        Returns:
            False if this member was out and has joined again: nothing was stepped, the next batch is a fresh one.
        """
        if self._loader is None or self._optimizer is None or self._state is None:
            raise ConfigurationError("call prepare() first")
        share = self._share()
        try:
            with _wish.end_the_wait(self.engine):  # the others may be too few, and the step may never come
                header = self.engine.step(
                    weight=share,
                    coefficient=share,
                    spent=self._loader.spent(),
                    hyper=hyper_words([self._optimizer]),
                    state_hash=self._proof,
                )
            if self.engine.member_id in header.drifted:
                raise FencedError(f"the state of {self.engine.member_id} differs from the others' at {header.step}")
        except FencedError:
            self._rejoin(self._state)
            return False
        except DepartedError:
            self._depart()
            return False
        self._optimizer.step()
        return True

    def check_state_replication(self) -> None:
        """If somebody waits to join, lets them in and makes the state available to them (Listing 1)."""
        if self._state is not None and not self._fenced:
            self.engine.serve(self._state)
        if self._state is not None and self.engine.header.boundary and not self.engine.out and not self._fenced:
            try:
                with _wish.end_the_wait(self.engine):
                    self.engine.boundary(self._state)
            except FencedError:
                self._rejoin(self._state)
            except DepartedError:
                self._depart()

    def _depart(self) -> None:
        """Let go by no header; the state stands on the last one."""
        if self._state is not None:
            self.engine.keep(self._state)
        self.engine.out = True

    def _rejoin(self, state: ModuleState) -> None:
        _log.warning("%s was put out of the job; this process joins again by itself", self.engine.member_id)
        try:
            with _wish.end_the_wait(self.engine):
                self.engine.rejoin(state)
        except DepartedError:
            if not self.engine.leaving:
                raise
            self.engine.out = True
        self._fenced = True

    def request_node_exit(self, reason: str = "") -> None:
        """Leaves politely: takes part, without samples, until a header lets this member go (Listing 2).

        Meanwhile its state follows by replay, for newcomers that may find nobody else. Where steps cannot be replayed,
        or there is extra state that they do not tell of, it hands out none that is not the others' any more.
        """
        engine, state = self.engine, self._state
        engine.leave(reason or _wish.seen or "the user asked")
        replay = ModuleReplay(state) if state is not None and not self._extra else None
        follows, current = replay is not None and not replay.replayable(), True
        try:
            while not engine.out and engine.header.kind is not Kind.CLOSING:
                if engine.world_size == 1 and engine.may_go():
                    break
                if state is not None and current:
                    engine.serve(state)
                header = engine.step(weight=0.0, coefficient=0.0, yields=True)
                if header.kind is Kind.STEP:
                    current = current and follows
                    if replay is not None and current:
                        replay.replay(header)
                elif header.kind is Kind.BOUNDARY and state is not None and current:
                    engine.admit(header, state)
        except FencedError:
            engine.out = True
        except DepartedError:
            pass  # let go at once: nobody is left who would need another step
        if state is not None and current:
            engine.keep(state)
        if engine.leaving and engine.header.kind is not Kind.CLOSING:
            engine.out = True
        if not engine.out:
            engine.finish()  # the others closed the job
            engine.out = self._awaited = True
        else:
            self._await_release()

    def _await_release(self) -> None:
        """Others may need what the header that let this member go commits, until they have entered its view."""
        if not self._awaited:
            self._awaited = True  # one deadline is enough where no scheduler is there to release anybody
            self.engine.wait_released()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends this member's part at once."""
        if self._loader is not None:
            self._loader.close()
        self.engine.close()
        self._switch_as_before()
        _wish.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._state is not None:
            self._end()
        self.close()

    def _end(self) -> None:
        """Closes the job with the others, or waits to be released by those who go on."""
        if not self.engine.out:
            try:
                self.engine.finish()
                return
            except DepartedError:  # all were asked to leave after the last step
                self._depart()
        self._await_release()


def refuse(model: nn.Module, optimizer: Optimizer) -> None:
    """UnsupportedError, before anything starts, for what no step of a job can serve."""
    found = [f"{type(optimizer).__name__}: {why}" for kind, why in NEVER.items() if isinstance(optimizer, kind)]
    if training.is_sharded(optimizer):
        found.append(f"{type(optimizer).__name__}: {training.SHARDED}")
    for name, module in model.named_modules():
        words = f"{name or 'the model'} ({type(module).__name__})"
        found += [f"{words}: {kind.why}" for kind in training.UNSERVED if kind.found(module)]
    if found:
        raise UnsupportedError("prepare() does not support:\n" + "\n".join(f"- {line}" for line in found))


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer's state comes out of a training. Some have a state of zeros from the start."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())
