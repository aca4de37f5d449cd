"""Finds the line of user code that asked for a slot, for the error when members ask for different ones.

Theory of operation. A slot is asked for from deep inside: a callback calls `trainer.save_checkpoint`, which asks the
strategy, which asks the engine. The line that helps is the innermost one of the stack that belongs to neither of the
libraries. Slots that Lightning's loop asks for by itself, such as steps, have none: there the user's line is that of
`fit`.
"""

from __future__ import annotations

import os
import sys

_LIBRARIES = ("chaos_lightning", "lightning", "torch", "torchmetrics", "contextlib", "functools")


def users_line() -> str:
    """Returns `save() at train.py:31`, or `at train.py:31` if the called function has no public name; "" for slots that
    the loop within `fit` asks for.
    """
    called, frame = "", sys._getframe(1)
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        called = frame.f_code.co_name
        if frame.f_back is None or called == "fit":
            return ""
        frame = frame.f_back
    place = f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return place if called.startswith(("_", "wrap")) else f"{called}() {place}"
