"""Models the outer state of a simulated rank with sets of inner steps instead of the tensors of
outer/cluster/cluster_model.py.

Theory of operation. Each inner step has a number. What was trained is a list of these, what a push holds is a set of
them, and a codec with a residual leaves some out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from chaos_lightning.outer.rules.types import NO_VERSION, PushAnswer, PushId, VersionId


@dataclass(frozen=True, slots=True)
class Pushed:
    """Content of a push; contents with equal manifests are equal."""

    base: VersionId
    steps: tuple[int, ...]
    manifest: str


@dataclass(frozen=True, slots=True)
class _Last:
    """The push that was frozen last, until it is answered: which inner steps it takes in, and which of them the codec
    left out.

    Attributes:
        lone: Inner steps of the push whose residual the rejection of an older push dropped since; lost if this one is
            void.
    """

    push: PushId
    base: VersionId
    live: tuple[int, ...]
    sent: tuple[int, ...]
    left: tuple[int, ...]
    lone: tuple[int, ...] = ()


@dataclass(slots=True)
class Content:
    """Outer state of a simulated rank; methods that discard inner steps return them.

    Attributes:
        lossy: Whether the codec has a residual.
        residual_at: Moment at which the residual changes: "answered", "sent", or "kept": not after a rejection.
        base: Version that was adopted last.
        live: Inner steps since the last freezing.
        residual: Inner steps that the codec left out.
        pushes: Open pushes, and answered ones that are still kept.
    """

    lossy: bool
    residual_at: str = "answered"
    base: VersionId = NO_VERSION
    live: list[int] = field(default_factory=list)
    residual: list[int] = field(default_factory=list)
    last: _Last | None = None
    pushes: dict[PushId, Pushed] = field(default_factory=dict)

    def freeze(self, push: PushId) -> None:
        """Fixes the content of a push, which `encoded` then returns; a push that founds a job has no inner steps."""
        founds = self.base == NO_VERSION
        steps = () if founds else (*self.live, *self.residual)
        left = tuple(s for s in steps if self.lossy and Random(f"{push} {s}").random() < 0.3)
        sent = tuple(s for s in steps if s not in left)
        self.last = _Last(push, self.base, () if founds else tuple(self.live), sent, left)
        self.live = self.live if founds else []
        if self.residual_at == "sent":
            self.residual = list(left)

    def encoded(self) -> Pushed:
        """Returns the content of the push that was frozen last."""
        assert self.last is not None
        last = self.last
        # Long lists by their hash: a leader takes manifests of bounded length.
        steps = hashlib.sha256(repr(sorted(last.sent)).encode()).hexdigest()[:16]
        return Pushed(last.base, last.sent, f"{last.push}:{last.base}:{len(last.sent)}:{steps}")

    def settle(self, push: PushId, answer: PushAnswer) -> list[int]:
        """Updates progress and residual after the answer to a push (O10); returns the discarded inner steps."""
        last, steps = self.last, self.pushes[push].steps
        own = last if last is not None and last.push == push else None
        if own is not None:
            self.last = None
        if answer is PushAnswer.REJECTED:
            return self._rejected(steps, own)
        if answer is PushAnswer.VOID:
            self.live = [*(own.live if own is not None else steps), *self.live]
            return list(own.lone) if own is not None else []
        self.residual = list(own.left) if own is not None else self.residual
        return []

    def _rejected(self, steps: Iterable[int], own: _Last | None) -> list[int]:
        last = self.last if own is None else own
        left = list(last.left) if last is not None else []
        gone = [*steps, *self.live, *left]
        if own is not None or last is None:
            gone += self.residual
        else:  # what was left out before is in that push, which may count yet
            lone = tuple(step for step in self.residual if step in last.sent)
            self.last = replace(last, left=(), lone=(*last.lone, *lone))
        self.live, self.residual = [], left if self.residual_at == "kept" else []
        return gone

    def adopt(self, version: VersionId, *, outright: bool) -> list[int]:
        """Makes a version the new base; returns the inner steps that an outright adoption discards."""
        gone, self.live = (self.live, []) if outright else ([], self.live)
        self.base = version
        return gone

    def forget(self) -> list[int]:
        """Resets the state for a new incarnation, which has no base; keeps the pushes, and returns the discarded inner
        steps.
        """
        residual = self.residual if self.last is None else []  # what was left out before is in that push
        gone = [*self.live, *residual, *self._last_steps]
        self.base, self.live, self.residual, self.last = NO_VERSION, [], [], None
        return gone

    @property
    def held(self) -> set[int]:
        """All inner steps in the rank's pushes, progress and residual."""
        pushed = {s for pushed in self.pushes.values() for s in pushed.steps}
        return pushed | {*self.live, *self.residual, *self._last_steps}

    @property
    def _last_steps(self) -> tuple[int, ...]:
        """Inner steps of the push that was frozen last, as far as `pushes` lacks them."""
        if self.last is None:
            return ()
        return self.last.left if self.last.push in self.pushes else (*self.last.sent, *self.last.left)
