"""Outer jobs whose final weights show which samples of the data they have learned, and how often.

A cluster's `theta[e, i]` grows by 1 when sample i is trained in epoch e (SGD, rate 1). So without momentum the job's
`theta[e, i]` is the rate of a round times the weight of the one push that holds it. A sample that was lost has weight
0, and one that counts twice has a weight that is no single push's.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from outer_job_support import OuterJob
from torch import nn
from torch.utils.data import DataLoader, Dataset

from chaos_lightning.diloco import DiLoCo
from chaos_lightning.outer.exchange.vocabulary import entry_of
from chaos_lightning.outer.rules.types import RolledBack, Round
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.testing.harness import Harness

BATCH = 16
ADDITIONS_ARE_EXACT = 1e-3
"""Sums of fp32 differ by less, and the weights of two pushes by more."""


class Numbers(Dataset[int]):
    """Data set in which each sample is its own index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> int:
        return number


class Counting(nn.Module):
    """Model whose gradient counts how often each sample of each epoch was trained."""

    def __init__(self, epochs: int, samples: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(epochs, samples))

    def forward(self, epoch: int, numbers: torch.Tensor) -> torch.Tensor:
        return -self.theta[epoch, numbers].sum()


def train_counting(job: CountedJob, name: str, server: str, logs: str, out: str) -> None:
    """Trains as a cluster, in a process of its own; writes the final weights to a file, and a byte for each step to
    another.
    """
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    model = Counting(job.epochs, job.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings: dict[str, Any] = {"inner_steps": 8, "policy": job.policy, "outer_lr": 1.0, "outer_momentum": 0.0}
    settings |= {"heartbeat_s": 1.0, "reconnect_s": 8.0, "patience_s": 40.0, "lease_ahead_s": 3.0}
    settings |= {"codec": "fp32", "log_dir": logs, "block": 1024}
    with (
        Path(out).with_suffix(".steps").open("ab") as steps,
        DiLoCo(model, optimizer, server=server, name=name, host_server=False, **settings) as outer,
    ):
        loader = DataLoader(Numbers(job.samples), BATCH, shuffle=True)
        for numbers in outer.prepare(loader, epochs=job.epochs):
            assert outer._loader is not None
            optimizer.zero_grad()
            ((epoch, _),) = outer._loader._out  # not the pass's: a rollback may have opened an epoch before it again
            model(epoch, numbers).backward()
            optimizer.step()
            outer.step()
            steps.write(b".")
            steps.flush()
            time.sleep(job.pace_s)
    torch.save(model.theta.detach().clone(), out)


class CountedJob:
    """Outer job with a server and clusters, all run as processes by a test's harness.

    Args:
        harness: Harness, whose directory holds the server's files.
        seed: Seed by which the policy is drawn, and of `random`, with which tests choose their faults.
        clusters: Number of clusters.
        samples: Number of samples of an epoch.
        epochs: Number of epochs.
        pace_s: Seconds of an inner step.
    """

    def __init__(
        self,
        harness: Harness,
        seed: int,
        *,
        clusters: int = 2,
        samples: int = 4000,
        epochs: int = 2,
        pace_s: float = 0.01,
    ) -> None:
        self.samples, self.epochs, self.pace_s = samples, epochs, pace_s
        self.random = Random(seed)
        self.policy = self.random.choice(("robust", "sync"))
        self.names = [f"c{number}" for number in range(clusters)]
        self._harness, self._server = harness, OuterJob(harness, 2)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def start(self) -> CountedJob:
        """Starts the server and all clusters."""
        self._server.start()
        for name in self.names:
            self.start_cluster(name)
        return self

    def start_cluster(self, name: str) -> None:
        logs, out = str(self._harness.logs), str(self._out(name))
        self._harness.start_function(name, train_counting, self, name, self._server.server, logs, out)

    def restart_server(self) -> None:
        """Starts the server again on the files in its folder."""
        self._server.start()

    def kill_server(self) -> None:
        """Kills the server's leader and followers by SIGKILL."""
        self._server.kill_server()

    def kill_all(self) -> None:
        """Kills the server and all running clusters by SIGKILL."""
        running = [name for name in self.names if self._harness.children[name].running]
        for name in running:
            self._harness.kill(name)
        self.kill_server()
        for name in running:
            self._harness.wait_exit(name)

    @property
    def running(self) -> list[str]:
        """Clusters that have not ended."""
        return [name for name in self.names if self._harness.children[name].running]

    @property
    def steps(self) -> int:
        """Number of inner steps that clusters have made."""
        return sum(path.stat().st_size for path in self._harness.directory.glob("*.steps"))

    @property
    def whole(self) -> int:
        """Number of inner steps of a job in which nothing is trained twice."""
        return self.epochs * self.samples // BATCH

    def reach(self, part: float) -> None:
        """Waits until this share of the job's steps is made, or a cluster has ended."""
        goal, all_run = part * self.whole, len(self.running)
        self._harness.wait_until(
            lambda: self.steps >= goal or len(self.running) < all_run or None, f"{part:.0%} of the steps"
        )

    def refused(self) -> bool:
        """Returns whether the running server has found that it has another job's chain, or an older copy of this
        job's.
        """
        names = {record.name for record in self._harness.records}
        return "cluster_refused" in names or any(
            r.name == "outer_leader_ended" and "lacks" in str(r.get("reason")) for r in self._harness.records
        )

    def snapshot(self, place: Path) -> None:
        """Copies the server's files to a folder while no process writes to them."""
        self._swap(self._server.folder, place)

    def put_back(self, place: Path) -> None:
        """Replaces the server's files by those in a folder; if that is empty, the server has no files then."""
        self._swap(place, self._server.folder)

    def _swap(self, source: Path, goal: Path) -> None:
        goal.mkdir(exist_ok=True)
        for kind in ("chain.sqlite*", *self._server.followers):
            for old in goal.glob(kind):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            for new in source.glob(kind):
                (shutil.copytree if new.is_dir() else shutil.copy)(new, goal / new.name)

    def _out(self, name: str) -> Path:
        return self._harness.directory / f"{name}.pt"

    def wait(self, *, may_fail: bool = False) -> list[str]:
        """Waits until all clusters have ended; returns the names of those that succeeded, which must be all unless
        `may_fail`.
        """
        if may_fail:
            self._harness.declare(*self.names)
        codes = {name: self._harness.wait_exit(name, 120.0) for name in self.names}
        well = [name for name, code in codes.items() if code == 0]
        assert well if may_fail else well == self.names, f"clusters ended with {codes}\n{self._outputs()}"
        return well

    def _outputs(self) -> str:
        """Returns the last characters that each process printed."""
        logs = sorted((self._harness.directory / "out").glob("*.log"))
        return "\n".join(f"--- {log.name}: {log.read_text(errors='replace')[-800:]}" for log in logs)

    def judge(self, well: list[str]) -> None:
        """Checks that the final weights of all clusters that succeeded contain each sample once, with the weight of the
        push that had it.
        """
        finals = [torch.load(self._out(name), weights_only=True) for name in well]
        for name, final in zip(well, finals, strict=True):
            assert torch.equal(final, finals[0]), f"the final weights of {name} are not those of {well[0]}"
        found = finals[0].double().flatten()
        lost = int((found == 0).sum())
        assert not lost, f"{lost} of {found.numel()} samples are lost"
        held = torch.tensor(self._pushed(), dtype=torch.float64)
        assert held.numel() == found.numel(), f"accepted pushes count {held.numel()} samples of {found.numel()}"
        off = (held.sort().values - found.sort().values).abs().max()
        assert off < ADDITIONS_ARE_EXACT, f"weights are off by {off} from what the chain says of their pushes"

    def _pushed(self) -> list[float]:
        """Returns the weight of each sample of each accepted push that was not rolled back, from the chain's
        records.
        """
        with SqliteStore(self._server.folder / "chain.sqlite", read_only=True) as store:
            _, records = store.read(0)
        standing: list[tuple[int, float, int]] = []
        before = ""
        for record in records:
            entry = entry_of(record, before)
            before, body = entry.hash, entry.body
            if isinstance(body, Round):
                rate = body.factors.rate
                standing += [(body.number, rate * each.factor, each.offer.samples) for each in body.accepted]
            elif isinstance(body, RolledBack):
                standing = [each for each in standing if each[0] <= body.to.number]
        return [weight for _, weight, samples in standing for _ in range(samples)]
