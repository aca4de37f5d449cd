"""Offers outer sync to plain PyTorch loops: each process trains by itself, and shares its progress through a parameter
server.

    with DiLoCo(model, optimizer, inner_steps=64) as diloco:
        for images, labels in diloco.prepare(loader, epochs=3):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            diloco.step(loss)

Theory of operation. The loop is the user's own, with its own optimizer steps. After each of them `step` reports to the
session (outer/cluster/session.py) what was trained; the session freezes pushes and adopts versions in that call. The
same script in a second terminal, or on another machine with `server="HOST:29470"`, is the second cluster. With
`data="shared"` each sample is trained once an epoch, by the cluster that it is leased to, and the loop ends when the
epochs are spent; with "local" each cluster goes over its own loader. At the first Ctrl+C or SIGTERM the cluster pushes
what it has trained and stays until that is durable; the second one says what it may cost to end now.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.collectives.canonical import run_words
from chaos_lightning.data.feeds import batch_length, declared_batch
from chaos_lightning.data.leased import LeasedLoader
from chaos_lightning.data.workers import tie_workers
from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.training import least_batch, reduced_buffers
from chaos_lightning.outer.cluster.cluster_effects import Boundary, renew
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.leaving import Patience, leaving_signals
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.session import OuterSession, agreement_of
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import Covered, JobProgress
from chaos_lightning.pipeline.hooked import alone
from chaos_lightning.planning.batches import UNTOLD
from chaos_lightning.protocol.types import Span
from chaos_lightning.variables import warn_of_unknown

_log = logging.getLogger("chaos_lightning")

LOSS_EVERY = 10
"""Number of steps between two looks at the loss, each of which waits for the device."""
_TURN_S = 0.1


class DiLoCo:
    """Cluster of a job with outer sync, for a plain training loop.

    Args:
        model: Model whose trained parameters travel, and whose BatchNorm statistics are averaged.
        optimizer: Inner optimizer; its state stays here.
        buffers: Names of further buffers that forward passes change, and that are to be averaged.
        words: Further values that must be equal in all clusters, such as a tokenizer's hash, by name.
        seed: Seed of the order of shared data; equal in all clusters.
        outer_optimizer: Optimizer of the server: auto, delayed_nesterov, nesterov or sgd (`optimizer` of
            `OuterSettings`).
        settings: Fields of `ClusterOptions` and of `OuterSettings`; the environment fills in the former. `batch`, the
            samples of a step, is by default that of a batch of the loader; to be given where a step uses several.

    Attributes:
        session: Part of this cluster in the job; None before `prepare`.

    Raises:
        ConfigurationError: A setting is unknown or cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        buffers: Iterable[str] = (),
        words: Mapping[str, str] | None = None,
        seed: int = 0,
        outer_optimizer: str | None = None,
        **settings: Any,
    ) -> None:
        warn_of_unknown()
        mine, rules = declared(ClusterOptions), {f.name for f in fields(OuterSettings)}
        if unknown := sorted(set(settings) - set(mine) - rules):
            raise ConfigurationError(f"unknown settings {unknown}; expected some of {sorted({*mine, *rules})}")
        alone("chaos_lightning.diloco", "its steps end with those of others; measure the loop without it")
        self.options = ClusterOptions.build({k: v for k, v in settings.items() if k in mine})
        self.session: OuterSession | None = None
        self._rules = {k: v for k, v in settings.items() if k in rules}
        if outer_optimizer is not None:
            self._rules["optimizer"] = outer_optimizer
            OuterSettings(**self._rules)
        self._model, self._optimizer = model, optimizer
        self._buffers = tuple(buffers)
        self._words = {"seed": str(seed), **(words or {})}
        self._seed = seed
        self._loader: LeasedLoader | None = None
        self._first: Iterable[Any] = ()
        """Batch that was looked at, followed by the rest of its loader's batches; empty if none was."""
        self._samples = self._steps = 0
        self._ended = ""
        self._signals = leaving_signals(self.leave, lambda: self._joined.at_risk)

    # ------------------------------------------------------------------ facts

    @property
    def progress(self) -> JobProgress:
        """Progress of the job as this cluster estimates it."""
        return self._joined.reckoned

    @property
    def _joined(self) -> OuterSession:
        if self.session is None:
            raise ConfigurationError("this cluster is in no job yet: call prepare() before step()")
        return self.session

    # ------------------------------------------------------------------ the loop

    def prepare(self, loader: Iterable[Any], *, epochs: int = 1, timeout_s: float = 60.0) -> Iterator[Any]:
        """Joins the job, then yields this cluster's batches until the epochs are over or the cluster leaves.

        The model's parameters are the job's newest version when this returns.

        Args:
            loader: A torch DataLoader; with `data="local"` anything that can be iterated over again.
            epochs: Passes over the data; with shared data those of all clusters together.
            timeout_s: Seconds to wait for a server that lets this cluster in.

        Raises:
            ConfigurationError: The server has another job; says in what it differs, and whose it is.
            DeadlineError, RefusedError: No server let this cluster in.
            StateError: The model has no buffer of a name in `buffers`.
        """
        shared = self.options.data == "shared"
        if shared:
            self._loader = LeasedLoader(
                loader, seed=self._seed, source=self, who=self.options.name, least=least_batch(self._model)
            )
            self._rules = {"epochs": epochs, **self._rules}
            self._words |= self._loader.words
        else:
            tie_workers(loader)
        if "batch" not in self._rules:
            self._rules["batch"] = self._loader.batch if self._loader is not None else self._size(loader)
        replica = Replica.of_module(self._model, reduced_buffers(self._model, self._buffers, named_by="buffers"))
        self._words |= run_words(self._model, {})
        settings = OuterSettings(**self._rules)
        agreement = agreement_of(
            replica,
            self.options,
            settings,
            length=self._loader.length if self._loader is not None else 0,
            words=self._words,
        )
        events = EventLog.in_directory(self.options.log_folder, self.options.name, role="cluster")
        batches = self._loader.batches() if self._loader is not None else UNTOLD
        self.session = OuterSession(replica, agreement, self.options, events, batches)
        self._signals.install()
        self.session.start(timeout_s)
        return self._batches(loader, epochs)

    def _batches(self, loader: Iterable[Any], epochs: int) -> Iterator[Any]:
        for _ in range(epochs):
            own, self._first = self._first or loader, ()
            for batch in self._loader if self._loader is not None else own:
                if self._joined.ending:
                    return
                if self._loader is None:
                    self._samples += batch_length(batch)
                yield batch
            if self._joined.ending:
                return

    def _size(self, loader: Iterable[Any]) -> int:
        """Returns the batch size that the loader declares, or else that of its first batch."""
        if not (size := declared_batch(loader)):
            batches = iter(loader)
            for first in batches:
                size, self._first = batch_length(first), itertools.chain([first], batches)
                break
            else:
                raise ConfigurationError("the loader has no batch; expected at least one, which can be trained")
        return size

    def claim(self, positions: int, *, wait: bool, within: int = -1) -> tuple[tuple[int, tuple[Span, ...]], ...]:
        """Leases positions for the loader (`data.leased.LeaseSource`); returns them by epoch."""
        session = self._joined
        patience = Patience(self.options.name, session.waits_for, self.options.patience_s)
        while not session.ending:
            got = session.claim(positions)
            if got or not wait or 0 <= within < session.progress.epoch:
                return tuple((each.epoch, each.spans) for each in got)
            self._take(session.boundary(0, steps=0))
            session.pause(_TURN_S)
            patience.look()
        return ()

    def step(self, loss: Any = None) -> Boundary:
        """Reports an optimizer step, to be called after each one; returns what is to be done before the next step.

        Args:
            loss: Loss of that step, for the log: a number, or a tensor of one element.
        """
        session = self._joined
        samples, covers = self._samples, tuple[Covered, ...]()
        if self._loader is not None:
            samples, used = self._loader.used()
            covers = tuple(Covered(epoch, spans) for epoch, spans in used)
        self._samples = 0
        self._steps += 1
        told = (
            float(loss.detach() if isinstance(loss, Tensor) else loss)
            if loss is not None and self._steps % LOSS_EVERY == 0
            else None
        )
        return self._take(session.boundary(samples, covers, loss=told))

    def _take(self, boundary: Boundary) -> Boundary:
        if boundary.outright and self._loader is not None:
            self._loader.forget()
        renew([self._optimizer], boundary)
        return boundary

    # ------------------------------------------------------------------ going

    def leave(self) -> None:
        """Requests to leave: the loop gets no more batches, and the `with` block ends once what was trained is
        durable.
        """
        self._joined.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Ends this cluster's part in the job; without an error, pushes what is left first and waits until it has left
        or the job has ended.
        """
        session = self.session
        if session is None:
            return
        try:
            if kind is None:
                session.finish("its epochs are over")
        finally:
            if self._loader is not None:
                self._loader.close()
            session.close()
            self._signals.restore()
