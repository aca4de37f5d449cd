"""Implements the rendezvous handler that torchrun's agent calls.

Theory of operation. A torchrun agent thinks in rendezvous rounds: all agents meet, get ranks, start their workers; when
anybody comes or goes, all workers are restarted. Here an agent meets nobody. `next_rendezvous` returns at once with a
store of its own, rank 0 of 1, so each agent is a world by itself that starts and restarts its own workers only; who
belongs to the job is settled between the workers and the scheduler, while training goes on. So:

- `num_nodes_waiting` is always 0 (anything else restarts all workers). The agent asks ten times a second, and the
  handler uses that to look now and then whether the scheduler, if it is this machine's to host, is still there.
- What workers need goes into the agent's own environment, which they inherit.
- The scheduler is started detached: it survives the agent's process group.
- More agents than max_nodes: their workers start all the same and wait as standbys in their Hello, where a SIGTERM
  finds them responsive; an agent that blocks in `next_rendezvous` would die without cleaning up.
- A worker that restarts (--max-restarts) is a newcomer. If its job has finished meanwhile, it must not begin anew
  because one worker failed on its way out. Where newcomers are told of the end (protocol.md 14d), the worker starts,
  and goes on behind the training, or ends well. Else the rendezvous is closed.
- Where the scheduler is another machine's to host, it is asked before workers start: one that still answers for a
  finished job, and tells newcomers nothing, closes the rendezvous. Where none answers, workers wait for it, and say so.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from chaos_lightning.control.hosting import chain_at, ensure_scheduler, is_over, may_host, options_for_engine
from chaos_lightning.errors import ChaosError, ConfigurationError, RefusedError
from chaos_lightning.machine.addresses import is_local, split_endpoint
from chaos_lightning.machine.orphan import VARIABLE, agent_mark
from chaos_lightning.machine.restarts import RestartPolicy, Restarts
from chaos_lightning.pipeline.hooked import alone
from chaos_lightning.rendezvous.options import RendezvousOptions, read_options
from chaos_lightning.rendezvous.polite import PoliteExit
from chaos_lightning.security.credentials import Credentials, check_bind
from chaos_lightning.variables import warn_of_unknown

logger = logging.getLogger("chaos_lightning.rendezvous")

BACKEND = "chaos"
_LOOK_INTERVAL_S = 2.0


class ChaosRendezvousHandler(RendezvousHandler):
    """Rendezvous handler of one torchrun agent.

    Args:
        run_id: torchrun's --rdzv-id.
        options: Everything else.
    """

    def __init__(self, run_id: str, options: RendezvousOptions) -> None:
        self._run_id = run_id
        self._options = options
        self._secret = Credentials.load(options.config.keys_dir, options.config.token_file)
        self._rounds = 0
        self._closed = False
        self._looked = 0.0
        self._looking: threading.Thread | None = None
        self._may_host = False
        self._chain = ""
        """Id of the chain by which the job goes, as its scheduler said last."""
        self._told = ""
        self._restarts = Restarts(RestartPolicy(2 * _LOOK_INTERVAL_S, 30 * _LOOK_INTERVAL_S))
        self._polite = PoliteExit(agent_mark(), self.patience_s)
        check_bind(options.config.bind, self._secret)

    @property
    def patience_s(self) -> float:
        """Seconds that workers may take to leave, with those for which they train on after SIGTERM."""
        return self._options.config.step_timeout_s + self._options.config.notice_plan.grace_s

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Makes sure that the job's scheduler runs, and lets this agent's workers start without waiting for other
        agents.

        Raises:
            RendezvousClosedError: The job is finished.
            RendezvousConnectionError: The scheduler cannot be started here, or something else is at its place.
        """
        if self._closed:
            raise RendezvousClosedError(f"job {self._options.config.job!r} is closed for this agent")
        self._polite.resort()  # workers that were asked to leave are not started again
        os.environ.update(self._options.environment())
        os.environ[VARIABLE] = agent_mark()
        self._host(continue_only=self._rounds > 0)
        self._rounds += 1
        self._looked = time.monotonic()
        store = HashStore()
        config = self._options.config
        info = RendezvousStoreInfo.build(0, store, local_addr=config.bind)
        logger.info("node %s of job %s: workers join at %s", self._options.node, config.job, config.endpoint)
        return RendezvousInfo(store, 0, 1, info)

    def _host(self, *, continue_only: bool) -> None:
        options = options_for_engine(self._options.config)
        config = self._options.config
        self._may_host = may_host(config, options)
        hosted = None
        try:
            if self._may_host and is_local(split_endpoint(options.listen)[0]):
                hosted = ensure_scheduler(
                    options,
                    self._secret,
                    continue_only=continue_only,
                    timeout_s=config.join_timeout_s,
                    chain=self._chain,
                )
            elif is_over(config, options, self._secret, continue_only=continue_only):
                self._closed = True
                raise RendezvousClosedError(
                    f"job {config.job!r} at {config.endpoint} is finished; no worker is started on node "
                    f"{self._options.node}. To begin a new job: start it once its scheduler has ended"
                )
        except ConfigurationError:
            raise
        except RefusedError as error:
            self._closed = continue_only
            kind = RendezvousClosedError if continue_only else RendezvousConnectionError
            raise kind(str(error)) from error
        except ChaosError as error:
            raise RendezvousConnectionError(str(error)) from error
        if hosted is not None:
            logger.info("started the scheduler at %s (pid %d, log %s)", hosted.endpoint, hosted.pid, hosted.log)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Returns 0 always, since torchrun would restart the workers if nodes were waiting; also looks after the
        scheduler and the signal handlers.
        """
        self._polite.watch()
        self.look_after_scheduler()
        return 0

    def look_after_scheduler(self) -> None:
        """Checks from time to time, in a thread, that a scheduler hosted by this machine still runs. Returns at
        once.
        """
        now = time.monotonic()
        pause_s = self._restarts.pause_s if self._restarts.failures else _LOOK_INTERVAL_S
        looking = self._looking is not None and self._looking.is_alive()
        if self._may_host and now - self._looked > pause_s and not looking:
            self._looked = now
            self._looking = threading.Thread(target=self._look, name="chaos-revive", daemon=True)
            self._looking.start()

    def _look(self) -> None:
        """Starts the scheduler again if it has ended and the job is not finished, since its members wait for it."""
        options = options_for_engine(self._options.config)
        try:
            hosted = ensure_scheduler(options, self._secret, continue_only=True, serves_end=False, chain=self._chain)
            self._chain = chain_at(options.listen, self._secret) or self._chain
            self._told = ""
            self._restarts.well()
        except RefusedError:
            return
        except ChaosError as error:
            self._restarts.failed()
            if str(error) != self._told:
                self._told = str(error)
                logger.warning("the scheduler could not be started again: %s", error)
            return
        if hosted is not None:
            logger.warning("the scheduler was gone; started another one on its chain (pid %d)", hosted.pid)

    def shutdown(self) -> bool:
        """Ends this agent's part in the rendezvous. The scheduler stays, since others may use it; it ends by itself."""
        self._closed = True
        return True


def create_handler(params: RendezvousParameters) -> ChaosRendezvousHandler:
    """Returns the rendezvous handler for torchrun's parameters."""
    alone("torchrun's backend chaos", "one process is measured; start the script by python")
    warn_of_unknown()
    options = read_options(
        endpoint=params.endpoint,
        run_id=params.run_id,
        nodes=(params.min_nodes, params.max_nodes),
        given=params.config,
        local_addr=params.local_addr,
    )
    return ChaosRendezvousHandler(params.run_id, options)
