"""Helpers that run programs as children of a fork server, which has imported torch and gRPC before, so that they start
fast.

The tests of control/ and examples/ start them as a user does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from until_support import until

from chaos_lightning.control.hosting import look
from chaos_lightning.control.options import SchedulerOptions
from chaos_lightning.machine.listener import free_port
from chaos_lightning.machine.process_table import start_time
from chaos_lightning.protocol.types import Settings
from chaos_lightning.service.hosting import HostedProcess
from chaos_lightning.testing.processes import start_function

TORCHRUN = "torch.distributed.run"
SCHEDULER = "chaos_lightning.control.scheduler_main"


def run(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    level: int = logging.WARNING,
) -> None:
    """Runs a module in a child process, as `python -m` would.

    Args:
        module: Module whose `main` is called.
        arguments: Arguments of the module's command line.
        environment: Whole environment of the child; None: it stays as it is.
        level: Lowest level of the log lines that are shown.
    """
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    logging.basicConfig(level=level)
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())


def patient(folder: Path) -> SchedulerOptions:
    """Returns options for a scheduler in this folder, with long timeouts, because test machines are slow."""
    return SchedulerOptions(
        listen=f"127.0.0.1:{free_port()}",
        store=str(folder / "chain.sqlite"),
        log_dir=str(folder / "events"),
        settings=Settings(heartbeat_timeout_s=3.0, confirm_timeout_s=1.0, report_timeout_s=5.0),
    )


def scheduler(options: SchedulerOptions) -> HostedProcess:
    """Starts a scheduler and returns it once it serves; the caller must `stop` it."""
    assert options.store_path is not None
    log = options.store_path.with_name("scheduler.log")
    child = start_function("scheduler", run, (SCHEDULER, options.arguments(), dict(os.environ)), log, env={})
    # The first child of a test run waits for the fork server's imports.
    until(
        lambda: look(options.listen, options.settings.job, b"") in ("serves", "tells"), "the scheduler's answer", 120.0
    )
    return HostedProcess(options.listen, child.pid, start_time(child.pid), log, options.store_path)
