"""Tests that user code which asks torch.distributed for its rank is told what to call instead."""

from __future__ import annotations

import warnings

import pytest
import torch

from chaos_lightning.member.process_group import warn_who_asks

WORDS = (
    r"test_process_group\.py:\d+: members of a job form no process group, .* all 3 of them\. Ask trainer\.rank instead"
)


def asks() -> bool:
    """Returns whether this is rank 0, by the test that scripts written for DDP use."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def test_each_line_is_warned_once_while_others_are_in_the_job() -> None:
    members, real = 1, torch.distributed.is_initialized
    end = warn_who_asks(lambda: members, "trainer.rank")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asks(), "alone it is right"
        members = 3
        with pytest.warns(UserWarning, match=WORDS):
            assert asks()
        assert asks()
        with pytest.warns(UserWarning, match=WORDS):
            assert not torch.distributed.is_initialized()
        end()
        assert asks()
    assert torch.distributed.is_initialized is real
    end()


def test_libraries_are_not_warned() -> None:
    end = warn_who_asks(lambda: 3, "trainer.rank")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.nn.SyncBatchNorm(2).eval()(torch.ones(2, 2)).shape == (2, 2)
        scope = {"__name__": "torch.something", "torch": torch}
        exec("answer = torch.distributed.is_initialized()", scope)
    end()
    assert scope["answer"] is False


def test_two_that_end_in_any_order_leave_what_was_there() -> None:
    real = torch.distributed.is_initialized
    one = warn_who_asks(lambda: 1, "trainer.rank")
    two = warn_who_asks(lambda: 1, "trainer.rank")
    two()
    one()
    assert torch.distributed.is_initialized is real
