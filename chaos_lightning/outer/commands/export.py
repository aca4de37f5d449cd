"""Writes a durable version as a checkpoint that plain Lightning loads: `chaos-lightning ps export`.

Theory of operation. A version lies in the followers' files, a shard each, and the leader's chain says what it must be:
its digests, and in its first entry the names and shapes of all tensors. Both are only read, so a job may run meanwhile,
and none has to. Of a job that goes on both move: where a file cannot be read the chain is read again, and if the
version is durable no more, the export begins anew. What clusters do not exchange (frozen parameters, integer buffers,
hyperparameters, the state of inner optimizers and schedules) comes from a checkpoint of a cluster, if one is given
(`--like`): its parameters and the counters of its loops are replaced by the version's, and its schedules are moved
there. So a Trainer can go on from it, at the beginning of the epoch. Without one there are weights alone, of tied ones
by all names.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.machine.addresses import is_local, split_endpoint, split_endpoints
from chaos_lightning.outer.commands.export_schedules import move_schedules
from chaos_lightning.outer.exchange.server_options import DEFAULT_SERVER, VARIABLE, ServerOptions
from chaos_lightning.outer.follower.shard_files import ShardFiles
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.types import HYPER, TIED, JobProgress, VersionId
from chaos_lightning.outer.server.chain_store import load_chain
from chaos_lightning.replication.saving import put_in_place
from chaos_lightning.replication.table import DTYPES
from chaos_lightning.service.main import EXIT_OK, HelpFormat
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.store import Store

NEWEST = "newest"
_LIGHTNING = "2.6.0"
"""Version of Lightning that is written into checkpoints if Lightning is not installed."""


def durable_version(chain: OuterChain, wanted: str) -> tuple[VersionId, tuple[str, ...]]:
    """Returns the durable version that `wanted` names, and the digests of its shards.

    Args:
        chain: Chain of the job.
        wanted: Version to find: "newest", a number, or as `ps status` writes it.

    Raises:
        ConfigurationError: There is no such version; the message says which there are.
    """
    if wanted == NEWEST and chain.durable:
        return chain.durable[-1]
    for found, digests in chain.durable:
        if wanted in (str(found.number), str(found)):
            return found, digests
    there = ", ".join(str(found) for found, _ in chain.durable) or "none yet"
    raise ConfigurationError(f"version {wanted}: expected {NEWEST} or a durable one; durable are {there}")


def hyper_parameters(chain: OuterChain) -> dict[str, Any]:
    """Returns the model's constructor arguments, as the job's first cluster sent them; values that JSON cannot
    represent are left out.
    """
    assert chain.agreement is not None, "a job with a version has begun"
    held: dict[str, Any] = json.loads(dict(chain.agreement.words).get(HYPER, "{}"))
    return held


def read_version(chain: OuterChain, folder: Path, job: str, wanted: str) -> tuple[dict[str, Tensor], JobProgress]:
    """Returns all tensors of a durable version by name, and the job's progress at that version.

    Args:
        chain: Chain of the job.
        folder: Folder that contains each follower's folder, by its name.
        job: Name of the job.
        wanted: Version to read, as for `durable_version`.

    Raises:
        ConfigurationError: There is no such version.
        StateError: A shard's file is missing, damaged, or not what the chain says.
    """
    found, digests = durable_version(chain, wanted)
    assert chain.agreement is not None, "a job with a version has begun"
    specs = chain.agreement.tensors
    grid = Grid(tuple(spec.elements for spec in specs), chain.agreement.block)
    flat = torch.empty(grid.elements)
    for name, shard, digest in zip(chain.cut, grid.cut(len(chain.cut)), digests, strict=True):
        if not (folder / name).is_dir():
            raise StateError(
                f"version {found} is not whole: there is no folder {folder / name} of follower {name}; copy it here"
            )
        state, _ = ShardFiles(folder / name, job).load(found, digest)
        start, stop = shard.span
        flat[start:stop] = state.theta
    tensors = {}
    for spec, values in zip(specs, torch.split(flat, list(grid.sizes)), strict=True):  # type: ignore[no-untyped-call]
        tensors[spec.name] = values.view(spec.shape).to(DTYPES[spec.dtype])
    tied = json.loads(dict(chain.agreement.words).get(TIED, "{}"))
    return tensors | {name: tensors[other] for name, other in tied.items()}, chain.progress(found)


def read_while_it_runs(
    load: Callable[[], OuterChain], folder: Path, job: str, wanted: str
) -> tuple[VersionId, dict[str, Tensor], JobProgress]:
    """Returns a durable version, its tensors and progress, while the job runs: if followers delete its files during the
    reading, it starts again.

    Args:
        load: Reads the chain.
        folder: Folder that contains each follower's folder, by its name.
        job: Name of the job.
        wanted: Version to read, as for `durable_version`.
    """
    chain = load()
    while True:
        found = durable_version(chain, wanted)
        try:
            return found[0], *read_version(chain, folder, job, str(found[0]))
        except StateError:
            chain = load()
            if found in chain.durable:
                raise


def checkpoint_of(
    tensors: dict[str, Tensor], progress: JobProgress, like: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns a checkpoint for Lightning, and a sentence for each of its parts that does not belong to the version.

    Args:
        tensors: Tensors of the version, by name.
        progress: Progress of the job at the version.
        like: Checkpoint of a cluster, which gives all else; None: there is nothing else.

    Raises:
        StateError: The checkpoint `like` is of another model.
    """
    if like is None:
        return {
            "epoch": progress.epoch,
            "global_step": progress.steps,
            "pytorch-lightning_version": _lightning(),
            "state_dict": tensors,
        }, []
    state = dict(like["state_dict"])
    for name, tensor in tensors.items():
        if name not in state or state[name].shape != tensor.shape:
            raise StateError(f"the checkpoint to be like has no tensor {name} of shape {list(tensor.shape)}")
        place = state[name].data_ptr()  # the chain of a job that older code began has no further names of it
        same = [n for n, t in state.items() if t.data_ptr() == place and t.shape == tensor.shape and t.numel()]
        state |= dict.fromkeys([name, *same], tensor)
    made = {**like, "epoch": progress.epoch, "global_step": progress.steps, "state_dict": state}
    if "loops" in like:
        made["loops"] = {**like["loops"], "fit_loop": _at(like["loops"]["fit_loop"], progress)}
    return made, move_schedules(made, like, progress)


def _at(fit_loop: dict[str, Any], progress: JobProgress) -> dict[str, Any]:
    """Returns the state of Lightning's fit loop for the job's progress; an epoch that was not over starts from its
    beginning.
    """
    made = copy.deepcopy(fit_loop)
    made["state_dict"].pop("combined_loader", None)  # where its loader was in another epoch
    made["epoch_loop.state_dict"]["_batches_that_stepped"] = progress.steps
    for scope in ("total", "current"):
        _put(made["epoch_progress"][scope], progress.epoch)
    batches = made["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    _put(batches["current"], 0)
    _put(batches["total"], batches["total"]["completed"])
    for steps in (
        made["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"],
        made["epoch_loop.manual_optimization.optim_step_progress"],
    ):
        _put(steps["total"], progress.steps)
    return made


def _put(counts: dict[str, int], number: int) -> None:
    counts.update(dict.fromkeys(counts, number))


def _lightning() -> str:
    try:
        return installed("lightning")
    except PackageNotFoundError:
        return _LIGHTNING


def _store(options: ServerOptions) -> Store:
    if options.in_etcd:
        from chaos_lightning.outer.server.standing import open_outer_store

        return open_outer_store(options.store, options.job)
    assert options.store_path is not None
    return SqliteStore(options.store_path, read_only=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `ps export`; returns the exit code."""
    known = declared(ServerOptions)
    parser = argparse.ArgumentParser(
        prog="chaos-lightning ps export",
        description="Write a durable version as a checkpoint that plain Lightning loads.",
        formatter_class=HelpFormat,
        allow_abbrev=False,
    )
    parser.add_argument("version", metavar="VERSION", help=f"{NEWEST}, or the number of a durable one (ps status)")
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it")
    parser.add_argument(
        "--like", type=Path, metavar="CKPT", help="a cluster's checkpoint, for what is not exchanged, and to go on from"
    )
    parser.add_argument(
        "--server",
        "--listen",
        default=os.environ.get(VARIABLE) or DEFAULT_SERVER,
        metavar="HOST:PORT",
        help=f"the server whose files lie here; its port names their default folder. Or the environment: {VARIABLE} "
        f"(default: {DEFAULT_SERVER})",
    )
    for name in ("dir", "store", "job"):
        parser.add_argument(f"--{name}", default=known[name].default, metavar="VALUE", help=known[name].short)
    given = parser.parse_args(arguments)
    if not given.file.absolute().parent.is_dir():
        raise ConfigurationError(f"{given.file}: there is no folder {given.file.absolute().parent}; make it first")
    server = split_endpoints(given.server)[0]
    if not given.dir and not given.store and not is_local(split_endpoint(server)[0]):
        raise ConfigurationError(
            f"--server {server}: the files of a version lie on that machine; run the command there, or copy its folder "
            "here and name it by --dir"
        )
    options = ServerOptions(dir=given.dir, store=given.store, job=given.job, listen=server)

    def load() -> OuterChain:
        with _store(options) as store:
            return load_chain(store)

    found, tensors, progress = read_while_it_runs(load, options.folder, options.job, given.version)
    # The user's own file, named by hand: Lightning's checkpoints hold objects of the user's classes.
    try:
        like = torch.load(given.like, map_location="cpu", weights_only=False) if given.like is not None else None
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"--like {given.like} is no checkpoint that can be read: {error}") from error
    made, left = checkpoint_of(tensors, progress, like)
    if like is None and (held := hyper_parameters(load())):
        made |= {"hyper_parameters": held, "hparams_name": "kwargs"}
    try:
        put_in_place(given.file, str(found.number), lambda beside: torch.save(made, beside))
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"{given.file} cannot be written: {error}") from error
    print(f"{found} of job {options.job}: {len(tensors)} tensors, step {progress.steps}, written to {given.file}")
    for words in left:
        print(f"note: {words}", file=sys.stderr)
    return EXIT_OK
