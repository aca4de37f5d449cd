"""Counts the fits of each job that the script of this process has been through.

A script that calls fit several times, as a loop over folds does, may train on other samples each time, which no hash of
its settings shows. So members compare the number of their fit. It counts per job name and endpoint: fits with names of
their own are each the first. In a notebook each execution of a cell is a script, and so is each statement typed into
Python.
"""

from __future__ import annotations

import builtins
import sys

_over: dict[tuple[object, str, str], int] = {}
"""Number of the last fit that is over, by script, job and endpoint."""


class Fit:
    """Fit of a job in this process.

    Attributes:
        number: 1 for the first fit of the job in its script.
    """

    def __init__(self, job: str, endpoint: str) -> None:
        self._key = (_script(), job, endpoint)
        self.number = _over.get(self._key, 0) + 1

    def over(self) -> None:
        """Notes that the script goes on behind this fit, so its next one has the next number. Idempotent."""
        _over[self._key] = max(self.number, _over.get(self._key, 0))


def _script() -> object:
    """Returns a value that is another one for each cell of a notebook and each statement at Python's prompt."""
    notebook = getattr(builtins, "get_ipython", None)
    if notebook is not None:
        return notebook().execution_count
    return object() if hasattr(sys, "ps1") else None
