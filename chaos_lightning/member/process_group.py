"""Warns user code that asks torch.distributed for its rank: members form no process group, so each would take itself
for rank 0.

Theory of operation. `torch.distributed.is_initialized()` is the first half of the usual test for rank zero; the second
half raises where there is no group. So that function is replaced while a member trains, and says the same as before. Of
calls by libraries nothing is said: they use no group that is not there.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType

import torch

_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_OURS = ("chaos_lightning", "torch")


def warn_who_asks(members: Callable[[], int], instead: str) -> Callable[[], None]:
    """Warns user code that calls `torch.distributed.is_initialized` while other members are in the job, once for each
    line.

    Args:
        members: Returns the number of members in the job, as far as this one knows.
        instead: Text that names what to ask for the rank instead.

    Returns:
        Function that ends the warnings; idempotent.
    """
    asked, told, over = torch.distributed.is_initialized, set[str](), False

    def is_initialized() -> bool:
        answer = bool(asked())
        if answer or over or torch.compiler.is_compiling() or members() < 2:
            return answer
        line = _line_of(sys._getframe(1))
        if line and line not in told:
            told.add(line)
            warnings.warn(
                f"torch.distributed.is_initialized() at {line}: members of a job form no process group, so code that "
                f"takes the answer False for rank 0 runs on all {members()} of them. Ask {instead} instead",
                stacklevel=2,
            )
        return answer

    def end() -> None:
        nonlocal over
        over = True
        if torch.distributed.is_initialized is is_initialized:
            torch.distributed.is_initialized = asked

    torch.distributed.is_initialized = is_initialized
    return end


def _line_of(frame: FrameType) -> str:
    """Returns file and line of a frame of user code; "" for a library's frame."""
    path = frame.f_code.co_filename
    room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if room in _OURS or any(part in path for part in _INSTALLED):
        return ""
    return f"{os.path.basename(path)}:{frame.f_lineno}"
