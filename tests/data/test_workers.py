"""Tests a DataLoader's workers: they keep the user's settings, have keyed seeds, and end with the training process."""

import copy
import os
import signal
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from elastic_job import Job
from test_elastic_loader import Numbers
from torch.utils.data import DataLoader, get_worker_info

from chaos_lightning.data.workers import WorkerInit, tie_workers
from chaos_lightning.machine.signals import POLITE, ExitSignals


class Seeds(Numbers):
    """Data set whose samples are the seed of the worker that reads them."""

    def __getitem__(self, i):
        return torch.tensor(get_worker_info().seed)


def seeds_of(name, seed, epoch):
    job = Job(lambda name: DataLoader(Seeds(8), num_workers=1), name, seed=seed)
    loader = job.loaders[f"{name}~1"]
    loader.set_epoch(epoch)
    batch = next(iter(loader))
    job.close()
    return batch.item()


def test_workers_are_seeded_by_job_member_and_epoch_not_by_the_process():
    torch.manual_seed(0)
    first = seeds_of("a", 5, 0)
    state = torch.get_rng_state()
    assert seeds_of("a", 5, 0) == first
    assert torch.equal(torch.get_rng_state(), state)  # opening iterators draws nothing from the training's generator
    assert len({first, seeds_of("b", 5, 0), seeds_of("a", 6, 0), seeds_of("a", 5, 1)}) == 4


def mark(worker):
    os.environ["MARKED"] = str(worker)


class Marks(Numbers):
    def __getitem__(self, i):
        return os.environ["MARKED"]


def plus(batch):
    return [*batch, "collated"]


def test_the_users_settings_are_kept():
    user = DataLoader(
        Marks(6), batch_size=2, num_workers=1, worker_init_fn=mark, collate_fn=plus, prefetch_factor=3, timeout=30
    )
    job = Job(lambda name: user, "a")
    loader = job.loaders["a~1"]
    assert next(iter(loader)) == ["0", "0", "collated"]
    assert loader.stats.drawn == 3 + 0  # prefetch_factor batches ahead; the epoch has no more
    inner = loader._feed._inner
    assert (inner.timeout, inner.prefetch_factor, inner.num_workers) == (30, 3, 1)
    job.close()


def test_out_of_order_is_not_honoured_and_said_so():
    loader = DataLoader(Numbers(4), num_workers=1, in_order=False)
    with pytest.warns(UserWarning, match="in_order=False is not honoured"):
        Job(lambda name: loader, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Job(lambda name: DataLoader(Numbers(4), in_order=False), "a")  # without workers it means nothing


KILLED = """
import os, signal, sys, socket
sys.path[:0] = [{tests!r}, {root!r}]
from elastic_job import Job
from test_elastic_loader import Numbers
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(1000))

link = socket.socket(fileno=int(sys.argv[1]))  # held by the workers, too, once they are forked
passes = []
for mode, data in (("shared", Numbers(1000)), ("local", Stream())):
    job = Job(lambda name: DataLoader(data, num_workers=2), "a", mode=mode)
    passes.append((job, iter(job.loaders["a~1"])))
    next(passes[-1][1])
link.send(b"up")
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_killed_process_closes_its_links_although_its_workers_hold_them():
    """When the training process is killed, its workers die at once, so that neighbours see its sockets close."""
    here = os.path.dirname(__file__)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED.format(tests=here, root=os.getcwd()), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        mine.settimeout(60)
        assert mine.recv(2) == b"up"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        mine.settimeout(4)  # below torch's 5 s
        assert mine.recv(1) == b""


class Served(Numbers):
    """Data set whose samples are the id of the process that reads them."""

    def __getitem__(self, i):
        return torch.tensor(os.getpid())


def workers_of(batch):
    return {int(pid) for pid in batch}


@pytest.mark.parametrize("user", ["shared", "local", "validation"])
def test_workers_let_signals_pass_that_ask_the_training_process_to_end(user):
    """Workers survive SIGTERM, Ctrl+C and SIGHUP, which systemd, Slurm and terminals send to them too, since the open
    step needs their batches.
    """
    came = []
    signals = ExitSignals(lambda number, frame: came.append(number), again=lambda number, frame: came.append(number))
    signals.install()
    try:
        loader = DataLoader(Served(40), batch_size=2, num_workers=2, persistent_workers=True)
        if user == "validation":
            job, iterator = None, iter(tie_workers(loader))
        else:
            job = Job(lambda name: loader, "a", mode=user)
            iterator = iter(job.loaders["a~1"])
        pids = workers_of(next(iterator)) | workers_of(next(iterator))
        assert len(pids) == 2
        for pid in pids:
            for number in POLITE:
                os.kill(pid, number)
        for _ in range(6):
            assert workers_of(next(iterator)) <= pids
        assert came == [], "a worker has inherited the handlers, and must not leave in this process's name"
        if job is not None:
            job.close()
        else:
            iterator._shutdown_workers()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        signals.restore()


class Stuck(Numbers):
    def __getitem__(self, i):
        signal.pause()


def test_a_worker_that_does_not_end_by_itself_is_killed_by_its_parent(monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    iterator = iter(tie_workers(DataLoader(Stuck(4), num_workers=1)))
    (worker,) = iterator._workers
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL


def test_a_copy_of_a_tied_loader_has_workers_of_its_own():
    tied = tie_workers(tie_workers(DataLoader(Served(4), num_workers=1)))
    copied = copy.deepcopy(tied)
    copied.dataset.length = 2
    assert len({int(pid) for pid in copied}) == 1
    assert isinstance(copied.worker_init_fn, WorkerInit)
    assert copied.worker_init_fn.user is None
