"""Runs a plain loop's part in a job whose batch has a fixed size: the loop itself computes the pieces of its share.

Theory of operation. A plain loop calls and is not called, so an attempt at a step (shares.py) is spread over its turns:
each turn gets one piece of this member's share, and the `update` at its end either asks for the next piece or, after
the last one, contributes and waits for the header. If a recovery has begun meanwhile, `update` drops the attempt, and
the next turn gets the first piece of the new share of the same samples. A member whose share is empty gets one turn
with a stand-in, all of whose changes are dropped. Random numbers between a piece and its `update` are keyed by the step
and the piece's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from chaos_lightning.data.pieces import SharePiece
from chaos_lightning.data.source import MicroBatch
from chaos_lightning.data.steps import StepBatch, steps_of
from chaos_lightning.errors import AttemptOverError
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.unit_steps import Attempts
from chaos_lightning.member.weighing import Sums
from chaos_lightning.pipeline.randomness import Randomness
from chaos_lightning.pipeline.shares import ShareAttempt, ShareStep, UserStep
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import Header, Kind, View

_LOOP = UserStep(lambda piece, data: None, lambda loss: None, lambda data, samples: float(samples), lambda j: b"")
"""Stands in for the user's part, which the loop runs by itself."""


class PlainShares:
    """Shares of steps that a plain loop computes, one piece in each of its turns.

    Args:
        engine: Engine of this member, not prepared yet.
        dataloader: The user's training loader.
        seed: Seed of the order of samples, and of random numbers; equal at all members.
        options: Further arguments of `StepLoader`.

    Attributes:
        batch: Batch of a step, as text; equal at all members.
        loader: Loader of steps.
        sums: Weights of the pieces.
        current: Facts about the piece that the loop has, or had last; None before the first one.
        began_again: Whether the last `update` has dropped the pieces of the step before it.
    """

    def __init__(self, engine: Engine, dataloader: Any, *, seed: int, **options: Any) -> None:
        config = engine.config
        rule, self._fits, self.loader = steps_of(dataloader, config.batch, config.fits, seed=seed, **options)
        self.batch, self.sums = str(rule), Sums()
        self._engine, self._seed, self._scales = engine, seed, False
        self._randomness, self._turn = Randomness(seed), ExitStack()
        self._step: ShareStep | None = None
        self.current: MicroBatch | None = None
        self.began_again = False
        self._attempts: Attempts | None = None
        self._attempt: ShareAttempt | None = None
        self._pieces: list[SharePiece] = []
        self._number = 0
        """Number of the present step."""
        self._turns = 0
        """Number of turns of the present attempt that were begun."""

    def attach(self, module: nn.Module, *, scales: bool) -> None:
        """Makes the prepared engine run its steps as shares of a batch.

        Args:
            module: The model.
            scales: Whether losses are scaled, so that weights must not make them larger.
        """
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        self._randomness, self._scales = Randomness(self._seed, device), scales
        self._step = ShareStep(module, self._engine.accumulation, lambda: None)
        self._engine.attach(self._step)

    @property
    def within(self) -> bool:
        """Whether a step is under way."""
        return self._attempts is not None

    def begin(self, batch: StepBatch, number: int, hyper: Callable[[], str], state_hash: str) -> None:
        """Begins a step.

        Args:
            batch: Samples of the step.
            number: Number of the step, from 1 on, with those before a checkpoint; random numbers are keyed by it.
            hyper: Returns hyperparameters in words, as of `Engine.step`; called when the share is contributed.
            state_hash: As of `Engine.step`.
        """
        engine, step = self._engine, self._step
        assert step is not None, "attach() comes first"
        said = {
            "name": "section 0",
            "coefficient": 1.0,
            "order": self.loader.order,
            "state_hashes": (state_hash,) if state_hash else (),
        }
        attempts = engine.begin_units(Kind.STEP, lambda _: said | {"hyper": hyper()})
        view = attempts.next()
        assert isinstance(view, View), "a step was committed without this member"
        self._attempts = attempts
        self._attempt = ShareAttempt(step, _LOOP, engine.member_id, batch, self._fits, scales=self._scales)
        self.sums.divisor = batch.samples if self._scales else 1.0
        self._number = number
        self._compute(view)

    def _compute(self, view: View) -> None:
        assert self._attempt is not None
        self._pieces, self._turns = self._attempt.begin(view, self._engine.header.seq + 1), 0

    def turns(self) -> Iterator[Any]:
        """Yields the samples of one piece after the other, until the step is over for this member."""
        while self._attempt is not None:
            self._turn.close()
            yield self._hand_out(self._attempt)

    def _hand_out(self, attempt: ShareAttempt) -> Any:
        batch, k = attempt.batch, self._turns
        piece = self._pieces[k] if self._pieces else SharePiece(0, ())
        data = attempt.fetch(piece) if self._pieces else self.loader.stand_in()
        self.current = MicroBatch(
            epoch=batch.epoch,
            stream=self.loader.stream,
            accumulation=batch.index,
            index=k,
            first=k == 0,
            last=k + 1 >= len(self._pieces),
            spans=piece.spans,
            samples=count(piece.spans),
        )
        if self.current.last and self._pieces and not self._scales:
            attempt.step.close()
        self._turns += 1
        self._turn.enter_context(self._randomness.stream("step", self._number, piece.number))
        return data

    def update(self, *, skipped: bool) -> Header | None:
        """Ends a turn; after the share's last piece contributes, and waits for the step's commit.

        Args:
            skipped: Whether the piece had no backward pass, so that it weighs nothing.

        Returns:
            The header; None if the step goes on with the next piece, or from its beginning (`began_again`).

        Raises:
            FencedError, DepartedError, DisagreementError, DeadlineError: See `Engine.step_by_units`.
        """
        attempts, attempt, turn = self._attempts, self._attempt, self.current
        assert attempts is not None
        assert attempt is not None
        assert turn is not None
        assert attempt.view is not None
        self._turn.close()
        self.began_again = False
        try:
            attempt.step.check(attempt.view.id)
            if turn.samples and not skipped:
                attempt.counts(self._pieces[turn.index], float(turn.samples))
            if not turn.last:
                return None
            if turn.idle:
                attempt.step.drop()
            attempts.contribute(attempt.view, attempt.done())
        except AttemptOverError:
            pass
        found = attempts.next()
        if isinstance(found, View):
            self.began_again = True
            self._compute(found)
            return None
        self.forget()
        return found

    def forget(self) -> None:
        """Forgets the step, which is over for this member."""
        self._turn.close()
        self._attempts = self._attempt = None

    def drop(self) -> None:
        """Drops the step under way, because this member leaves it: the model is as of the last header again."""
        attempt = self._attempt
        self.forget()
        if attempt is not None:
            attempt.step.drop()
