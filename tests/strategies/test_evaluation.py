"""Tests validation with several loaders at once: which combined batches each member evaluates, also after a death."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from chaos_lightning.strategies.evaluation import EvalLoader, Evaluation, refit_limits

MODES = ("max_size", "min_size", "max_size_cycle")


class Meetings:
    """Double of the other members, which meet at the end of a pass.

    Args:
        here: Members that come, meeting by meeting.
    """

    def __init__(self, *here: Sequence[str]) -> None:
        self.here = [set(members) for members in here]

    def meet(self, name: str) -> set[str]:
        return self.here.pop(0)

    def enter_step(self, hook: str) -> None:
        """Does nothing: the other members reduce no values."""

    def leave_step(self, collection: Any, *, always: bool) -> None:
        """Does nothing: the other members reduce no values."""

    def exchange(self, name: str, value: Any) -> None:
        return None


def evaluated(me: str, members: str, meetings: Meetings, combined: CombinedLoader, **settings: Any) -> list[Any]:
    """Returns the batches that member `me` evaluates in one pass; checks how many Lightning is told to fetch."""
    fetcher = SimpleNamespace(length=1)
    loop = SimpleNamespace(
        _results=_ResultCollection(training=False), _combined_loader=combined, _data_fetcher=fetcher,
        _max_batches=[len(loader) for loader in combined.flattened],
    )  # fmt: skip
    trainer: Any = SimpleNamespace(
        limit_val_batches=1.0, sanity_checking=False, strategy=SimpleNamespace(reduce=None),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop)),
    )  # fmt: skip
    vars(trainer).update(settings)
    evaluation = Evaluation(trainer, meetings, lambda: tuple(members), lambda: me)  # type: ignore[arg-type]
    combined.flattened = [
        EvalLoader(loader, evaluation) if type(loader) is DataLoader else loader for loader in combined.flattened
    ]
    iter(combined)
    refit_limits(trainer, evaluation)
    got: list[Any] = []
    with contextlib.suppress(StopIteration):
        while len(got) < fetcher.length:
            got.append(next(combined)[0])
    assert fetcher.length == len(got) + (evaluation.assigning is not None)
    return got


def loaders(*batches: int) -> list[DataLoader]:
    return [DataLoader([f"{n}{i}" for i in range(count)], batch_size=1) for n, count in enumerate(batches)]


def alone(mode: Any, *batches: int) -> list[Any]:
    combined = CombinedLoader(loaders(*batches), mode)
    return [batch for batch, _, _ in combined]


@pytest.mark.parametrize("members", ["ab", "abc"])
@pytest.mark.parametrize("batches", [(5, 3), (3, 5), (7, 3), (4, 4), (6, 5, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_members_have_the_combined_batches_of_one_machine(mode: Any, batches: tuple[int, ...], members: str) -> None:
    expected = alone(mode, *batches)
    for place, me in enumerate(members):
        got = evaluated(me, members, Meetings(members), CombinedLoader(loaders(*batches), mode))
        assert got == expected[place :: len(members)]


@pytest.mark.parametrize("mode", MODES)
def test_combined_batches_of_the_dead_are_evaluated_by_the_others(mode: Any) -> None:
    expected = alone(mode, 7, 5)
    got = [evaluated(me, "abc", Meetings("ab", "ab"), CombinedLoader(loaders(7, 5), mode)) for me in "ab"]
    assert sorted(map(str, got[0] + got[1])) == sorted(map(str, expected))
    assert got[0][: len(expected[0::3])] == expected[0::3]


def test_limits_count_combined_batches() -> None:
    got = [
        evaluated(me, "ab", Meetings("ab"), CombinedLoader(loaders(5, 3), "max_size"), limit_val_batches=3)
        for me in "ab"
    ]
    assert [len(g) for g in got] == [2, 1]


@pytest.mark.parametrize("mode", MODES)
def test_if_one_of_them_cannot_be_assigned_everybody_evaluates_all(mode: Any) -> None:
    made = CombinedLoader([*loaders(5, 3), ["x", "y", "z"]], mode)
    expected = [batch for batch, _, _ in CombinedLoader([*loaders(5, 3), ["x", "y", "z"]], mode)]
    assert evaluated("b", "ab", Meetings(), made) == expected
