"""Settings of outer sync, each declared once, with its default, help and check (declared.py).

Two settings follow the policy unless the user says otherwise: the optimizer and the bound of the clip. So `di_ps` is
the paper to the letter, and `async` the naive way that the paper compares with. The paper says in two ways what a push
counts for; `di_ps_from` chooses one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from chaos_lightning.declared import at_least, check_each, declared, one_of, positive, setting
from chaos_lightning.errors import ConfigurationError

POLICIES = ("robust", "sync", "async", "di_ps")
DIFFERENCES = ("now", "base")
OUTER = "CHAOS_OUTER_"
"""Beginning of the variables of those settings whose names are also settings of members: a cluster's ranks may be
members of an elastic job, whose launcher tells them its own.
"""
OPTIMIZERS = ("auto", "delayed_nesterov", "nesterov", "sgd")


def _part(value: float) -> str:
    return "" if 0 <= value < 1 else "expected a number from 0 on and below 1"


def _positive(value: float) -> str:
    return "" if 0 < value < math.inf else "expected a positive number"


def _share(value: float) -> str:
    return "" if 0 <= value <= 1 else "expected a number from 0 to 1"


def _weight(value: float) -> str:
    return "" if 0 < value <= 1 else "expected a number above 0, up to 1"


def _cosine(value: float) -> str:
    return "" if -1 <= value <= 1 else "expected a cosine, from -1 to 1"


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """Rules of one outer job, the same for all its clusters and for whoever leads it."""

    policy: str = setting(
        "robust",
        "When a round is decided, and which pushes count. robust waits a little and refuses outliers; sync waits for "
        "every cluster that trains; async takes each push by itself; di_ps is the paper's rule (see di_ps_from).",
        check=one_of(POLICIES),
        prefix=OUTER,
    )
    optimizer: str = setting(
        "auto",
        "What the server does with the average of a round's pushes. delayed_nesterov scales it by the round's part of "
        "the usual samples, and moves the momentum once these are in; nesterov takes each round in full, as published; "
        "sgd has no momentum. auto: delayed_nesterov for robust and sync, nesterov for async and di_ps.",
        check=one_of(OPTIMIZERS),
    )
    outer_lr: float = setting(0.7, "Learning rate of the server (eta).", check=_positive)
    outer_momentum: float = setting(0.8, "Momentum of the server (mu).", check=_part)
    inner_steps: int = setting(
        64, "Inner steps of a usual cluster from one push to the next (H).", check=at_least(1, "a number of steps")
    )
    batch: int = setting(
        32,
        "Samples of an inner step of a usual cluster, all its ranks together (B). H B K of them are a full round of K "
        "clusters, by which a round of fewer is scaled.",
        check=at_least(1, "a number of samples"),
        prefix=OUTER,
    )
    clip: float = setting(
        0.0,
        "Largest norm of the average of a round's pushes; longer ones are shortened to it. 0: no bound, but 1 for "
        "di_ps, as in the paper.",
        check=at_least(0, "a norm, or 0 for none"),
    )
    discount_stale: bool = setting(
        False, "Weigh a push from an older base less, by the root of its staleness. di_ps never does."
    )
    staleness_cap: int = setting(
        16,
        "A push whose base is more versions old than this is void, and its cluster's next one covers its progress. 0: "
        "none is too old.",
        check=at_least(0, "a number of versions, or 0"),
    )
    gate_limit: float = setting(
        3.0,
        "robust refuses a push whose norm lies so many standard deviations above what is usual.",
        check=positive("standard deviations"),
    )
    gate_warmup: int = setting(
        12, "So many accepted pushes must say what is usual first.", check=at_least(2, "a number of pushes from 2 on")
    )
    gate_again: int = setting(
        8,
        "After so many pushes in a row that are too long, of all clusters, what is usual is learned anew. After so "
        "many refusals in a row of one cluster, its pushes that are turned round are let in, shortened to a tenth of "
        "what the others say together.",
        check=at_least(1, "a number of pushes"),
    )
    gate_patience: int = setting(
        2,
        "After so many refusals in a row, a cluster's pushes that are too long and do not grow are let in, shortened "
        "to the longest that passes. Pushes above four times what is usual wait for gate_again of them.",
        check=at_least(1, "a number of pushes"),
    )
    gate_cosine: float = setting(
        0.0,
        "robust refuses a push whose cosine with the sum of the others of its round is smaller, if it is against the "
        "momentum, too. -1: none.",
        check=_cosine,
    )
    di_ps_alpha: float = setting(0.02, "Weight of a push in the paper's moving averages (alpha).", check=_weight)
    di_ps_beta: float = setting(
        3.0, "di_ps refuses a push whose score is above so many times the largest recent one (beta).", check=_positive
    )
    di_ps_from: str = setting(
        "now",
        "What a push counts for under di_ps. now: the version before its round minus the cluster's parameters (the "
        "paper's Algorithm 1); pushes hold parameters in fp32, whatever the codec. base: the version that the cluster "
        "began from minus its parameters (Appendix B), as with the other policies.",
        check=one_of(DIFFERENCES),
    )
    grace_cap: float = setting(
        0.5,
        "How long a window waits for further pushes, as a part of a cluster's round. robust waits for so long, since "
        "clusters train on meanwhile; di_ps at most.",
        check=_share,
    )

    heartbeat_s: float = setting(1.0, "A cluster that misses three heartbeats in a row is removed.", check=_positive)
    last_holder_timeout_s: float = setting(
        600.0,
        "A silent cluster is not removed for so long while a shard may lack a push that it alone holds.",
        check=_positive,
    )
    reconnect_s: float = setting(
        10.0, "After another leader took over, clusters have so long to come back.", check=_positive
    )
    lease_ahead_s: float = setting(
        120.0, "Clusters that share the data are dealt samples for so long ahead.", check=_positive
    )
    epochs: int = setting(
        0, "The job ends after so many epochs of the shared data. 0: never.", check=at_least(0, "a number of epochs")
    )

    def __post_init__(self) -> None:
        check_each(self)

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """Names and values of all settings, as text, for an agreement."""
        return tuple((name, str(getattr(self, name))) for name in declared(OuterSettings))

    @classmethod
    def of_words(cls, words: Iterable[tuple[str, str]]) -> Self:
        """Returns the settings from names and values; missing ones have their default, except that `di_ps_from` is
        "base", as in older releases.

        Raises:
            ConfigurationError: An unknown name, or a value that cannot be one.
        """
        known = declared(OuterSettings)
        given = {"di_ps_from": "base"} | dict(words)
        if unknown := sorted(set(given) - set(known)):
            raise ConfigurationError(f"outer settings {', '.join(unknown)} are unknown; known are {', '.join(known)}")
        return cls(**{name: known[name].read(value, f"outer setting {name}") for name, value in given.items()})

    @property
    def optimizer_used(self) -> str:
        """Optimizer that the setting chooses; for `auto` the one that fits the policy."""
        if self.optimizer != "auto":
            return self.optimizer
        return "delayed_nesterov" if self.policy in ("robust", "sync") else "nesterov"

    @property
    def clip_used(self) -> float:
        """Largest norm of a round's average of pushes; 0.0 for no bound."""
        return self.clip or (1.0 if self.policy == "di_ps" else 0.0)

    @property
    def pushes_parameters(self) -> bool:
        """Whether a push contains its cluster's parameters, so that a round takes their difference to the version
        before it.
        """
        return self.policy == "di_ps" and self.di_ps_from == "now"

    @property
    def round_samples(self) -> int:
        """Number of samples from one push to the next of a cluster with the usual settings (H B)."""
        return self.inner_steps * self.batch
