"""Tests how calls of `fit` are numbered within a script."""

from __future__ import annotations

import builtins
import sys
from types import SimpleNamespace

import pytest

from chaos_lightning.machine import fits
from chaos_lightning.machine.fits import Fit


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_over", {})


def fitted(job: str = "job", endpoint: str = "here:1") -> int:
    fit = Fit(job, endpoint)
    fit.over()
    return fit.number


def test_fits_are_counted_by_job_and_endpoint() -> None:
    assert [fitted(), fitted(), fitted("other"), fitted("job", "here:2"), fitted()] == [1, 2, 1, 1, 3]


def test_a_fit_that_was_refused_is_begun_again_under_its_number() -> None:
    refused = Fit("job", "here:1")
    assert refused.number == 1
    assert [fitted(), fitted()] == [1, 2]


def test_members_that_are_in_at_once_begin_the_same_fit() -> None:
    both = [Fit("job", "here:1"), Fit("job", "here:1")]
    for fit in both:
        fit.over()
    assert [fit.number for fit in both] == [1, 1]
    assert fitted() == 2


def test_each_execution_of_a_cell_is_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(execution_count=7)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert [fitted(), fitted()] == [1, 2]
    shell.execution_count = 8
    assert fitted() == 1


def test_each_statement_that_is_typed_is_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert [fitted(), fitted()] == [1, 1]
