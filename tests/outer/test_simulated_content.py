"""The simulator's model of a push's content reports all inner steps that are discarded (O9), and none that may still
count.
"""

from __future__ import annotations

import pytest

from chaos_lightning.outer.rules.types import IncarnationId, PushAnswer, PushId, VersionId
from lab.outer.content import Content

FIRST, SECOND = (PushId(IncarnationId("home", 1), number) for number in (1, 2))


def frozen(content: Content, push: PushId) -> tuple[int, ...]:
    """Returns the inner steps that this push contains."""
    content.freeze(push)
    content.pushes[push] = content.encoded()
    return content.pushes[push].steps


def sending_a_residual() -> tuple[Content, set[int], set[int]]:
    """Returns a content whose second push is unanswered and contains the residual of the first; the first push's steps;
    and that residual's steps.
    """
    content = Content(lossy=True, base=VersionId(1, "1"), live=[*range(100)])
    first = set(frozen(content, FIRST))
    assert content.settle(FIRST, PushAnswer.ACCEPTED) == []
    content.live += range(100, 110)
    sent = set(frozen(content, SECOND))
    old = {step for step in sent if step < 100}
    assert old
    assert not old & first
    return content, first, old


@pytest.mark.parametrize("answer", [PushAnswer.VOID, PushAnswer.REJECTED])
def test_a_push_that_fails_loses_the_residual_that_a_rejection_dropped(answer: PushAnswer) -> None:
    """The first push is reopened by a rollback and rejected, which drops its residual; if the second push fails, too,
    that residual is lost.
    """
    content, first, old = sending_a_residual()
    before = content.held
    thrown = set(content.settle(FIRST, PushAnswer.REJECTED))
    assert first <= thrown
    assert not old & thrown, "the second push may count yet"
    thrown |= set(content.settle(SECOND, answer))
    content.pushes.clear()
    assert old <= thrown
    assert before == thrown | content.held


def test_a_push_that_counts_has_the_residual_that_a_rejection_dropped() -> None:
    content, _, old = sending_a_residual()
    thrown = {*content.settle(FIRST, PushAnswer.REJECTED), *content.settle(SECOND, PushAnswer.ACCEPTED)}
    assert not old & thrown


def test_a_void_push_throws_nothing_away_where_nothing_was_rejected() -> None:
    content, _, old = sending_a_residual()
    assert content.settle(SECOND, PushAnswer.VOID) == []
    assert old <= {*content.residual}
