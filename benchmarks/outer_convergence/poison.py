"""Poisons pushes at the cluster that made them, and counts the rounds' verdicts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from chaos_lightning.outer.rules.types import Entry, PushId, Round

KINDS = ("noise", "not finite", "flipped")
"""Ten times the norm in noise; a NaN and infinities; the sign turned."""
NOISE = 10.0


@dataclass
class Poison:
    """Choice of the pushes to poison: a random share of them after the warm-up, with the kinds of poison in turn.

    Attributes:
        share: Share of all pushes that are poisoned; 0.0: none.
        seed: Seed of the choice.
        warmup: Number of pushes that must have been accepted before the first poisoned one.
        kinds: Kind of poison of each poisoned push, by push.
    """

    share: float
    seed: int
    warmup: int
    kinds: dict[PushId, str] = field(default_factory=dict)

    def spoil(self, push: PushId, accepted: int, gained: Tensor) -> bool:
        """Poisons a push in place if a draw seeded by its name says so; returns whether it did.

        Args:
            push: Name of the push.
            accepted: Number of pushes that were accepted so far.
            gained: Values of the push, fp32, flat; changed in place.
        """
        chance = Random(f"{self.seed} {push.incarnation.cluster} {push.number}")
        if accepted < self.warmup or chance.random() >= self.share:
            return False
        kind = KINDS[len(self.kinds) % len(KINDS)]
        self.kinds[push] = kind
        draw = torch.Generator().manual_seed(chance.randrange(1 << 40))
        if kind == "noise":
            noise = torch.randn(gained.shape, generator=draw)
            gained.add_(noise, alpha=float(NOISE * gained.norm() / noise.norm()))
        elif kind == "not finite":
            some = torch.randint(len(gained), (3,), generator=draw)
            gained[some] = torch.tensor([math.nan, math.inf, -math.inf])
        else:
            gained.neg_()
        return True


@dataclass
class Verdicts:
    """Counts of the verdicts of rounds on good and on poisoned pushes.

    Attributes:
        good: Number of good pushes that were answered.
        good_rejected: Number of good pushes that were rejected.
        made: Number of poisoned pushes that were answered, by kind.
        caught: Number of poisoned pushes that were rejected, by kind.
        flipped_in_company: Number of negated pushes in windows of three and more pushes.
        flipped_caught: Number of negated pushes in such windows that were rejected.
        alone: Number of negated pushes that were alone in their window.
        reasons: Reasons for which good pushes were rejected.
    """

    good: int = 0
    good_rejected: int = 0
    made: Counter[str] = field(default_factory=Counter)
    caught: Counter[str] = field(default_factory=Counter)
    flipped_in_company: int = 0
    flipped_caught: int = 0
    alone: int = 0
    reasons: list[str] = field(default_factory=list)

    def read(self, entry: Entry, kinds: Mapping[PushId, str]) -> None:
        """Counts the verdicts in an entry of the chain."""
        if not isinstance(entry.body, Round):
            return
        rejected = {refusal.offer.push: refusal.reason for refusal in entry.body.rejected}
        pushes = [*(weighed.offer.push for weighed in entry.body.accepted), *rejected]
        for push in pushes:
            kind = kinds.get(push)
            if kind is None:
                self.good += 1
                if push in rejected:
                    self.good_rejected += 1
                    self.reasons.append(f"{push}: {rejected[push]}")
                continue
            self.made[kind] += 1
            self.caught[kind] += push in rejected
            if kind == "flipped":
                self.flipped_in_company += len(pushes) > 2
                self.flipped_caught += len(pushes) > 2 and push in rejected
                self.alone += len(pushes) == 1

    def add(self, other: Verdicts) -> None:
        """Adds the verdicts of another run to these counts."""
        self.good += other.good
        self.good_rejected += other.good_rejected
        self.made.update(other.made)
        self.caught.update(other.caught)
        self.flipped_in_company += other.flipped_in_company
        self.flipped_caught += other.flipped_caught
        self.alone += other.alone
        self.reasons += other.reasons

    def as_json(self) -> dict[str, Any]:
        """Returns all counts as JSON."""
        return vars(self) | {"made": dict(self.made), "caught": dict(self.caught)}
