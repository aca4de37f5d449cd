"""Agents as children of the fork server: torch, which takes an agent's first seconds, is imported there already.

examples/test_example_scripts.py starts torchrun as a user does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence

TORCHRUN = "torch.distributed.run"


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str], level: int = logging.WARNING) -> None:
    """What `python -m` does with this module, in an environment that has nothing else; our lines from this level on."""
    os.environ.clear()
    os.environ.update(environment)
    logging.basicConfig(level=level)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
