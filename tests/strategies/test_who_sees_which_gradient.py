"""Tests which hooks see this member's own gradient and which see the average, as docs/compat.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from strategy_job import Job
from strategy_models import ClipsInBackward

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"
LAST, EARLIER, MANUAL = range(3)
"""Columns of the page's table."""


def told(column: int) -> dict[str, str]:
    """Returns, for each hook, what docs/compat.md says that it sees, from this column of its table; hooks that are
    not called are left out.
    """
    text = PAGE.read_text()
    table = text[text.index("| hook | automatic optimisation") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {row[0].split("`")[1]: row[1 + column] for row in rows if row[1 + column]}


@pytest.mark.parametrize(
    ("accumulate", "manual"), [(1, False), pytest.param(2, False, marks=pytest.mark.slow), (1, True)]
)
def test_hooks_see_what_the_page_says(job: Job, accumulate: int, manual: bool) -> None:
    """Each hook sees the gradient that docs/compat.md says, also in a micro-batch of which one of two members has no
    samples.
    """
    job.fresh(min_nodes=2)
    for name in "ab":
        job.start(
            name, epochs=2, samples=22, model="Looks", model_args={"manual": manual},
            trainer={"accumulate_grad_batches": accumulate, "limit_val_batches": 0},
            ignore=["You defined a `validation_step`"],
        )  # fmt: skip
    a, b = (report["found"] for report in job.finish("a", "b"))
    for last in (True, False) if accumulate > 1 else (True,):
        found = {}
        for hook in a.keys() | b.keys():
            places = [place for place in a[hook].keys() & b[hook].keys() if place[2] == last]
            if places:
                equal = {torch.equal(a[hook][place], b[hook][place]) for place in places}
                found[hook] = "averaged" if equal == {True} else "own" if equal == {False} else "both"
        page = told(MANUAL if manual else LAST if last else EARLIER)
        if last and accumulate > 1:
            del page["on_before_zero_grad"]  # called with a step's first micro-batch
        assert found == page


def test_all_members_run_the_hook_that_changes_the_average(job: Job) -> None:
    """A hook clips the averaged gradient: it runs at a member without samples, too, so that all members step alike."""
    job.fresh(min_nodes=2)
    for name in "ab":
        job.start(name, epochs=2, samples=20, model="ClipsAfterBackward")
    a, b = job.finish("a", "b")
    assert a["counter"] == b["counter"] == a["step"] == 6
    assert torch.equal(a["weights"], b["weights"])


def test_a_gradient_that_is_changed_where_it_is_the_members_own_is_named(job: Job) -> None:
    job.harness.declare("a")
    job.start("a", epochs=1, model=ClipsInBackward.__name__)
    assert job.harness.wait_exit("a") == 1
    assert "was changed between backward and the optimizer step" in job.harness.children["a"].log.read_text()
