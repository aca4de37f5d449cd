"""Numbers the calls of `fit` for each job in this process's script.

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
    """One call of `fit` for a job in this process.

    Attributes:
        number: 1 for the first fit of the job in its script.
    """

    def __init__(self, job: str, endpoint: str) -> None:
        self._key = (_script(), job, endpoint)
        self.number = _over.get(self._key, 0) + 1

    def over(self) -> None:
        """Notes that the script has continued after this fit, so that its next fit gets the next number. Idempotent."""
        _over[self._key] = max(self.number, _over.get(self._key, 0))


def _script() -> object:
    """Returns a value that differs between cells of a notebook, and between statements at Python's prompt."""
    notebook = getattr(builtins, "get_ipython", None)
    if notebook is not None:
        return notebook().execution_count
    return object() if hasattr(sys, "ps1") else None
