"""Candidates (standby schedulers) whose connections to members and to etcd can be cut one by one.

Theory of operation. Each candidate is told to advertise a relay of its own (`scheduler --advertise`), so that members
and other candidates dial that; who dials is found by the port that it dials from, in the tables of this machine's
kernel. To each etcd server each candidate has a relay of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from engine_job import Job, says, who_leads

from chaos_lightning.control.requests import fetch_status
from chaos_lightning.machine.listener import free_ports
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.testing.edge.relay import Way


class Apart:
    """Candidates s0, s1, ... of a job, each counted as on a machine of its own."""

    def __init__(self, job: Job, etcd: EtcdServers, count: int, **rules: Any) -> None:
        self.job = job
        self.etcd = etcd
        self.paths: dict[str, Way] = {}
        self.to_etcd: dict[str, list[Way]] = {}
        for name, port in zip((f"s{n}" for n in range(count)), free_ports(count), strict=True):
            own = f"127.0.0.1:{port}"
            self.paths[name] = Way(own, self._pids)
            self.to_etcd[name] = [Way(server.endpoint) for server in etcd.servers]
            store = f"etcd://{','.join(path.endpoint for path in self.to_etcd[name])}"
            command = [sys.executable, "-m", "chaos_lightning.control.scheduler_main", "--listen", own]
            command += ["--advertise", self.paths[name].endpoint, "--settings", json.dumps({"min_nodes": 1, **rules})]
            command += ["--store", store, "--log-dir", str(job.harness.logs)]
            job.harness.start(name, command, env={"CHAOS_HOST": name})
        job.endpoint = ",".join(path.endpoint for path in self.paths.values())
        job.harness.wait_for("scheduler_started")

    def _pids(self) -> dict[int, str]:
        return {child.pid: name for name, child in self.job.harness.children.items()}

    # ------------------------------------------------------------------ looking

    def leading(self) -> str:
        return self.named(who_leads(self.job)["endpoint"])

    def facts(self, name: str) -> dict[str, Any]:
        """Returns the status that this candidate reports of itself."""
        return fetch_status(self.paths[name].endpoint, follow=False)

    def says(self, name: str, **words: str) -> dict[str, Any]:
        """Waits until the status of this candidate contains all these words at once, each under its key ("" means
        empty).
        """
        return says(self.job, self.paths[name].endpoint, **words)

    def named(self, endpoint: str) -> str:
        return next(name for name, path in self.paths.items() if path.endpoint == endpoint)

    def others(self, name: str) -> list[str]:
        return [other for other in self.paths if other != name]

    # ------------------------------------------------------------------ cutting

    def note(self, kind: str, node: str, peer: str) -> None:
        self.job.harness.events.emit("fault_injected", kind=kind, node=node, peer=peer)

    def cut_from_members(self, candidate: str, *members: str) -> None:
        for member in members:
            self.note("cut_stream", member, candidate)
            self.paths[candidate].cut(member)

    def stall_from_members(self, candidate: str, *members: str) -> None:
        """Stalls the connections between a candidate and members, like a network that drops packets: no byte passes,
        and no end is closed.
        """
        for member in members:
            self.note("stall_stream", member, candidate)
            self.paths[candidate].stall(member)

    def mend_to_members(self, candidate: str, *members: str) -> None:
        for member in members:
            self.paths[candidate].restore(member)

    def cut_from_etcd(self, candidate: str) -> None:
        self.note("cut_etcd", candidate, "etcd")
        for path in self.to_etcd[candidate]:
            path.cut()

    def mend_to_etcd(self, candidate: str) -> None:
        for path in self.to_etcd[candidate]:
            path.restore()

    def close(self) -> None:
        """Kills the candidates, since etcd servers wait for their clients, and closes the ways to them."""
        for name in self.paths:
            if self.job.harness.children[name].running:
                self.job.harness.kill(name)
        for path in (*self.paths.values(), *(p for paths in self.to_etcd.values() for p in paths)):
            path.close()
