"""Implements `chaos-lightning run`: torchrun for a node with several workers, where the failure of one does not stop
the others.

Theory of operation. torchrun ends and restarts all workers of a node when one of them fails, since elsewhere none of
them can go on without the others. Here each worker is a member of its own: so each has an agent of its own here, which
starts it, and starts it again when it fails, after a pause that doubles from one failure to the next. All else is
torchrun's own code: options are parsed by its parser, workers are started by `torch.distributed.elastic` with the
environment that its agent makes, and output, log folders and error files are made as there. What workers
need to find their job comes from the rendezvous handler, as under torchrun.

Who waits for a scheduler, at a start or a restart, does so in a thread, and the others are looked after meanwhile. A
restart that fails counts as a failure of its worker; where no worker was ever started, it ends the command.

At the first SIGINT, SIGTERM, SIGHUP or SIGQUIT all workers are asked to leave the job politely (by SIGINT or SIGTERM,
the signals that they know), and none is started again; the second one, or patience that is at an end, ends them. Other
notices (docs/notices.md) are the workers' own affair: each follows them, leaves, and ends with success. The exit code
is 0 if every worker ended well in the end, else that of the first one that was given up.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from string import Template
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import PContext, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.utils.api import macros
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.machine.restarts import RestartPolicy, Restarts
from chaos_lightning.machine.signals import ExitSignals, say
from chaos_lightning.rendezvous.handler import BACKEND, create_handler
from chaos_lightning.rendezvous.options import conf_help
from chaos_lightning.rendezvous.polite import asking, pass_on
from chaos_lightning.service.main import HelpFormat

logger = logging.getLogger("chaos_lightning.rendezvous")

HELP = """\
Start the workers of this node, each with an agent of its own: one that dies takes no other one along, and is started
again while the others train on. Options are torchrun's own and mean what they mean there, but for these defaults:
--rdzv-backend is chaos, --nnodes is 1:256, --max-restarts is 9 and counts for each worker by itself; between two starts
of a worker there is a pause of 1 s, then 2 s, up to 30 s. Ctrl+C (or SIGTERM) lets all workers leave the job politely;
once more ends them. If they were the last ones, the training state is kept in a file, and the next start goes on from
it.

  chaos-lightning run --nproc-per-node=gpu train.py
  chaos-lightning run --nproc-per-node=4 --rdzv-endpoint=HOST:29400 --nnodes=2:16 train.py --lr 0.1

The second line, on as many machines as you like: the job begins with two of them, and others come and go.
"""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds before a worker that failed is started again; doubled with each failure in a row."""
STEADY_S = 60.0
"""Seconds after which a worker that runs does not count as failing in a row any more."""
_TURN_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def parser() -> argparse.ArgumentParser:
    """Returns torchrun's command line parser, with the name, help texts and defaults of `chaos-lightning run`."""
    made: argparse.ArgumentParser = get_args_parser()
    made.prog, made.description = "chaos-lightning run", HELP
    made.formatter_class, made.epilog = HelpFormat, conf_help()
    made.set_defaults(rdzv_backend=BACKEND, nnodes="1:256", max_restarts=9)
    return made


def run(arguments: Sequence[str]) -> None:
    """Runs the command.

    Raises:
        SystemExit: Always; see the module for the code.
        ConfigurationError: Options that cannot work here.
    """
    given = parser().parse_args(list(arguments))
    refused = {
        "--rdzv-backend": given.rdzv_backend != BACKEND and f"{given.rdzv_backend}: this command is for {BACKEND} only",
        "--standalone": given.standalone and "leave it out: without --rdzv-endpoint the job is this machine's",
        "--virtual-local-rank": given.virtual_local_rank and "workers are told apart by LOCAL_RANK",
        "--numa-binding": given.numa_binding and "it needs torchrun's own agent",
    }
    for option, why in refused.items():
        if why:
            raise ConfigurationError(f"chaos-lightning run {option}: {why}")
    given.master_port = given.master_port or 29500
    try:
        config, entrypoint, command = config_from_args(given)
    except ValueError as error:
        raise ConfigurationError(f"chaos-lightning run: {error}") from error
    sys.exit(NodeWorkers(config, given, entrypoint, command).run())


@dataclass
class Worker:
    """A worker of this node, through all its restarts.

    Attributes:
        rank: LOCAL_RANK of the worker.
        context: Context of the process that runs now.
        restarts: Number of restarts so far.
        pauses: Pauses between them.
        code: Exit code of its last process, once it is not started again.
        last: Exit code of its last failure.
    """

    rank: int
    context: PContext | None = None
    restarts: int = 0
    pauses: Restarts = field(default_factory=lambda: Restarts(RestartPolicy(FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S)))
    code: int | None = None
    last: int = 0
    began: float = 0.0
    due: float = field(default_factory=time.monotonic)


class NodeWorkers:
    """Starts, watches and restarts all workers of this node."""

    def __init__(self, config: LaunchConfig, given: argparse.Namespace, entrypoint: Any, command: list[str]) -> None:
        self._config = config
        self._given = given
        self._entrypoint = entrypoint
        self._command = command
        self._handler = create_handler(
            RendezvousParameters(
                backend=BACKEND,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
        self._workers = [Worker(rank) for rank in range(config.nproc_per_node)]
        self._patience_s = config.shutdown_timeout if config.shutdown_timeout is not None else 30
        self._signals = ExitSignals(self._ask_all, _SIGNALS, again=self._end_all)
        self._again = False
        self._first_code = 0
        self._seeking: tuple[Worker, Future[RendezvousInfo]] | None = None
        """Worker that is about to be started, once a scheduler is found."""

    def run(self) -> int:
        """Runs until all workers have ended for good; returns the exit code."""
        self._signals.install()
        try:
            while any(w.code is None for w in self._workers):
                try:
                    self._turn()
                    time.sleep(_TURN_S)
                except SignalException as error:  # torch's handler stood for a moment: it installs it at each start
                    self._signals.receive(error.sigval, None)
        finally:
            for worker in self._workers:
                if worker.context is not None:
                    worker.context.close(signal.SIGTERM, self._patience_s)
            self._signals.install()
            self._signals.restore()
        return self._first_code

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        if self._asked is not None:
            self._end_if_due()
        elif self._seeking is None:
            self._handler.look_after_scheduler()
        for worker in self._workers:
            if worker.context is not None:
                self._look(worker)
            elif worker.code is None and self._asked is not None:
                worker.code = 0  # it was about to be started again, into a job that this node leaves
            elif worker.code is None and time.monotonic() >= worker.due:
                self._start(worker)

    def _look(self, worker: Worker) -> None:
        assert worker.context is not None
        result = worker.context.wait(0)
        if result is None:
            return
        worker.context.close(signal.SIGTERM, self._patience_s)
        worker.context = None
        if not result.is_failed():
            worker.code = 0
            return
        worker.last = next(iter(result.failures.values())).exitcode
        self._failed(worker, worker.last)

    def _failed(self, worker: Worker, code: int, error: str = "") -> None:
        """Handles a worker that ended with this exit code, or that could not be started (`error`): restarts it or
        gives it up.
        """
        words = error or _words(code)
        if self._asked is None and worker.restarts < self._config.max_restarts:
            self._put_off(worker, f"{'could not be started' if error else 'ended'} ({words})")
            return
        worker.code = code or 1
        self._first_code = self._first_code or _exit_code(worker.code)
        why = "on its way out" if self._asked is not None else f"after {worker.restarts} restarts; the others train on"
        self._say(f"worker {worker.rank} failed {why} ({words})")

    def _put_off(self, worker: Worker, what: str) -> None:
        now = time.monotonic()
        worker.restarts += 1
        pause_s = worker.pauses.failed(now - worker.began)
        worker.due = now + pause_s
        others = sum(w.context is not None for w in self._workers)
        self._say(
            f"worker {worker.rank} {what}; it is started again in {pause_s:g} s "
            f"(restart {worker.restarts} of {self._config.max_restarts}); {others} other(s) of this node go on"
        )

    def _seek(self) -> Future[RendezvousInfo]:
        """Calls the rendezvous in a thread, since it may take as long as a worker would wait for its scheduler."""
        outcome: Future[RendezvousInfo] = Future()

        def look() -> None:
            try:
                outcome.set_result(self._handler.next_rendezvous())
            except Exception as error:  # of any kind: whoever asks for the result gets it
                outcome.set_exception(error)

        threading.Thread(target=look, name="chaos-rendezvous", daemon=True).start()
        return outcome

    def _start(self, worker: Worker) -> None:
        """Looks for the job for a worker, or, once that is done, starts the worker. One at a time, as all share one
        environment.
        """
        if self._seeking is None:
            worker.began = time.monotonic()
            self._seeking = worker, self._seek()
        whose, outcome = self._seeking
        if whose is not worker or not outcome.done():
            return
        self._seeking = None
        try:
            self._begin(worker, outcome.result())
        except RendezvousClosedError as error:
            again = " again" if worker.restarts else ""
            self._say(f"worker {worker.rank} is not started{again}: {error}")
            worker.code = worker.last or 1  # it failed, and nothing has made up for that
            self._first_code = self._first_code or _exit_code(worker.code)
        except (RendezvousConnectionError, ChaosError, OSError, subprocess.SubprocessError) as error:
            if not any(w.context is not None or w.restarts for w in self._workers):
                raise
            self._failed(worker, 1, str(error))

    def _begin(self, worker: Worker, info: RendezvousInfo) -> None:
        config, rank, store = self._config, worker.rank, info.bootstrap_store_info
        assert store is not None
        workers = str(config.nproc_per_node)
        environment = {
            **{name: str(rank) for name in ("LOCAL_RANK", "RANK", "ROLE_RANK")},
            **dict.fromkeys(("LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"), workers),
            "GROUP_RANK": str(info.rank),
            "GROUP_WORLD_SIZE": str(info.world_size),
            "ROLE_NAME": config.role,
            "MASTER_ADDR": store.master_addr,
            "MASTER_PORT": str(store.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(worker.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
            "TORCHELASTIC_RUN_ID": config.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": str(self._handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        prefix = Template(config.log_line_prefix_template or "[${role_name}${rank}]:").safe_substitute(
            role_name=config.role, rank=rank, local_rank=rank
        )
        worker.context = start_processes(
            name=config.role,
            entrypoint=self._entrypoint,
            args={0: tuple(macros.substitute(self._command, str(rank)))},
            envs={0: environment},
            logs_specs=self._logs(rank),
            log_line_prefixes={0: prefix},
            start_method=config.start_method,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
        )
        worker.began = time.monotonic()
        self._signals.install()
        if self._asked is not None:
            self._ask(worker)  # it was not there yet

    def _logs(self, rank: int) -> Any:
        """Returns torchrun's log settings for one worker, whose local rank is 0 in a process group of its own."""
        given = self._given
        shown = {int(r) for r in given.local_ranks_filter.split(",")} if given.local_ranks_filter else {rank}
        make: Any = type(self._config.logs_specs)
        return make(
            log_dir=os.path.join(given.log_dir, f"worker_{rank}") if given.log_dir else None,
            redirects=_of(Std.from_str(given.redirects), rank),
            tee=_of(Std.from_str(given.tee), rank),
            local_ranks_filter={0} if rank in shown else {1},
        )

    # ------------------------------------------------------------------ going

    @property
    def _asked(self) -> signal.Signals | None:
        """Signal by which workers were asked to leave; None before."""
        return self._signals.asked

    def _ask_all(self, number: signal.Signals, frame: FrameType | None) -> None:
        running = sum(w.context is not None for w in self._workers)
        self._say(asking(number, running))
        for worker in self._workers:
            self._ask(worker)

    def _end_all(self, number: signal.Signals, frame: FrameType | None) -> None:
        self._again = True

    def _ask(self, worker: Worker) -> None:
        if worker.context is not None and self._asked is not None:
            pass_on(self._asked, worker.context.pids().values())

    def _end_if_due(self) -> None:
        late = time.monotonic() - self._signals.asked_at > self._handler.patience_s
        if not (late or self._again):
            return
        self._again = False
        for worker in self._workers:
            if worker.context is not None:
                worker.context.close(signal.SIGTERM, self._patience_s)

    @staticmethod
    def _say(text: str) -> None:
        say(f"chaos-lightning run {os.getpid()}: {text}")


def _of(given: Std | dict[int, Std], rank: int) -> Std:
    return given.get(rank, Std.NONE) if isinstance(given, dict) else given


def _exit_code(code: int) -> int:
    """Returns the exit code as a shell reports it: 128 plus the signal's number."""
    return 128 - code if code < 0 else code


def _words(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
