"""Identifies the run of a Hydra sweep that this process is in, since one process runs them one after another."""

from __future__ import annotations

import sys
from typing import Any


def sweep_run() -> str:
    """Returns the output folder of the present run of a Hydra sweep, unique per run; "" outside a sweep."""
    module: Any = sys.modules.get("hydra.core.hydra_config")  # asked only if the script is Hydra's
    if module is None or not module.HydraConfig.initialized():
        return ""
    config = module.HydraConfig.get()
    return str(config.runtime.output_dir) if config.mode is not None and config.mode.name == "MULTIRUN" else ""
