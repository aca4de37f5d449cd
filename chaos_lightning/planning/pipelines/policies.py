"""Defines the named policies, each of which proposes ways to go on after a loss.

Theory of operation. A *policy* is a function from the ways that there are at a moment (`Options`) to candidates, of
which `choice` takes the one of the greatest value. Options are asked of whoever knows the devices: `formation` for a
fleet of equal ones, by counters; a running job for its own, by plans. So one and the same policy is simulated and run.

    reroute     the micro-batches of the lost go to the owners of the same layers (ReCycle)
    dynamic     always the best plan for the devices that are left
    oobleck     prepared templates of pipelines
    algorithm1  the search of the paper Chameleon
    restart     from the newest checkpoint, with pipelines of one length (Varuna)
    redundant   each device also holds and runs the stage behind its own (Bamboo)
    adaptive    whichever of rerouting, seating newcomers, the best plan and, where that is risky, one of templates is
                worth most; and installed policies' own

Others are installed as entry points of the group `chaos_lightning.policies`. Where a policy raises, or has no candidate
that fits, the job goes on by what is possible at all, and the decision says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.choice import KINDS, Decision, Outlook, PlanCandidate, choose
from chaos_lightning.planning.pipelines.job import check_number

GROUP = "chaos_lightning.policies"
"""Group of entry points that are policies."""

RISKY = 0.01
"""Risk of the best plan from which on `adaptive` also looks for a plan of templates, which has two copies of each
layer.
"""


class Options(Protocol):
    """Interface to the ways in which a job can go on at some moment; a method returns None if its way is not
    possible.
    """

    @property
    def whole(self) -> bool:
        """Whether there is a plan that has lost no device."""
        ...

    def keep(self) -> PlanCandidate | None:
        """Returns the candidate that moves no layers: other owners take the micro-batches of vacant places."""
        ...

    def fill(self) -> PlanCandidate | None:
        """Returns the candidate that gives vacant places to idle devices."""
        ...

    def avoid(self) -> PlanCandidate | None:
        """Returns the candidate that treats slow devices as lost."""
        ...

    def move(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that moves layers to a new plan: the `best` one, or that of `oobleck`, `algorithm1` or
        `shadowed`.
        """
        ...

    def shadow(self) -> PlanCandidate | None:
        """Returns the candidate in which devices that hold redundant stages take over those of lost devices."""
        ...

    def restart(self, kind: str = "best") -> PlanCandidate | None:
        """Returns the candidate that restarts from the newest checkpoint, with the `best`, a `symmetric` or a
        `shadowed` plan.
        """
        ...


Policy = Callable[[Options], Iterable[PlanCandidate | None]]


def reroute(options: Options) -> Iterator[PlanCandidate | None]:
    yield options.keep()
    yield options.fill()


def _anew(kind: str) -> Policy:
    """Returns a policy that makes a new plan of the given kind after each loss, and without a loss only if that
    pays.
    """

    def policy(options: Options) -> Iterator[PlanCandidate | None]:
        if options.whole:
            yield options.keep()
        yield options.move(kind)

    return policy


def restart(options: Options) -> Iterator[PlanCandidate | None]:
    yield options.keep() if options.whole else options.restart("symmetric")


def redundant(options: Options) -> Iterator[PlanCandidate | None]:
    yield options.shadow()
    yield options.move("shadowed")


def adaptive(options: Options) -> Iterator[PlanCandidate | None]:
    yield options.keep()
    yield options.fill()
    yield options.avoid()
    best = options.move()
    yield best
    if best is not None and best.risk > RISKY:
        yield options.move("oobleck")


POLICIES: dict[str, Policy] = {
    "adaptive": adaptive,
    "reroute": reroute,
    "dynamic": _anew("best"),
    "oobleck": _anew("oobleck"),
    "algorithm1": _anew("algorithm1"),
    "restart": restart,
    "redundant": redundant,
}


@cache
def installed() -> dict[str, Policy]:
    """Returns the policies that users have installed; a policy that fails to load raises its error when it is
    called.
    """
    found: dict[str, Policy] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in POLICIES or entry.name in found:
            words = f"{entry.value} is installed under a name that is taken; expected another than {entry.name!r}"
            found[f"{entry.name} ({entry.value})"] = _raising(words)
            continue
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            found[entry.name] = _raising(f"{entry.value} cannot be loaded: {error}")
    return found


def _raising(words: str) -> Policy:
    def policy(options: Options) -> Iterable[PlanCandidate | None]:
        raise PlanError(words)

    return policy


def policy(name: str) -> Policy:
    """Returns the built-in or installed policy of this name.

    Raises:
        PlanError: There is no such policy; lists those there are.
    """
    found = POLICIES.get(name) or installed().get(name)
    if found is None:
        known = ", ".join([*POLICIES, *sorted(installed())])
        raise PlanError(f"policy {name!r} is unknown; expected one of {known}")
    return found


class _Noting:
    """Wrapper of options that records the plans they make, so that a user's policy cannot return a plan of its own."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.plans: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._options, name)
        if not callable(found):
            return found

        def ask(*args: Any, **named: Any) -> Any:
            candidate = found(*args, **named)
            self.plans.append(getattr(candidate, "plan", None))
            return candidate

        return ask


_LEAST = {"step_s": None, "samples": None, "transition_s": 0, "redo_s": 0, "risk": 0, "void_samples": 0, "devices": 0}
"""Least value of each field of a candidate; None: more than 0."""


def _checked(who: str, c: PlanCandidate, plans: list[Any]) -> PlanCandidate:
    """Returns a candidate of a policy, with the policy's name; refuses one that cannot be carried out.

    Raises:
        PlanError: The candidate cannot be carried out.
    """
    if not isinstance(c, PlanCandidate) or c.kind not in KINDS or c.plan is None:
        raise PlanError(
            f"this is no way to go on: {c!r}; expected one of the options', or one with all of their fields"
        )
    for name, least in _LEAST.items():
        check_number(name, getattr(c, name), least=least)
    check_number("samples / step_s", c.throughput)
    if c.risk > 1:
        raise PlanError(f"risk is {c.risk!r}; expected a probability")
    if not isinstance(c.lacks, str) or not isinstance(c.about, str):
        raise PlanError(f"lacks is {c.lacks!r}, about is {c.about!r}; expected texts")
    if not any(c.plan is plan for plan in plans):
        raise PlanError(f"plan is {c.plan!r:.60}; expected that of a candidate which an option made")
    return replace(c, policy=who)


def decide(name: str, options: Options, outlook: Outlook) -> Decision:
    """Asks a policy for candidates and returns the decision among them.

    Args:
        name: Name of the policy.
        options: Ways to go on that are possible.
        outlook: Facts and rules by which candidates are compared.
    """
    asked = {name: policy(name)}
    if name == "adaptive":
        asked |= installed()
    candidates: list[PlanCandidate] = []
    failed: list[tuple[str, str]] = []
    for who, function in asked.items():
        try:
            noting = _Noting(options)
            candidates += [_checked(who, c, noting.plans) for c in function(noting) if c is not None]
        except Exception as error:
            failed.append((who, f"{type(error).__name__}: {error}"))
    if not any(c.fits for c in candidates):
        spare = [options.keep(), options.move(), options.restart()]
        candidates += [replace(c, policy="otherwise") for c in spare if c is not None and c.fits][:1]
    return choose(candidates, outlook, tuple(failed))
