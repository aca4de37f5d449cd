"""Members of jobs with pipelines, which benchmarks start, kill and compare, and the job that contains them.

A member trains by `Trainer(strategy="chaos_pipeline")`: a small GPT, or timed layers (lab/timed_layers.py). With a rule
for a batch of fixed size it trains by `chaos` instead. It
kills or freezes itself at one place of a step, when a file asks for it (`Strikes`). All that benchmarks measure they
read in the event logs. What they compare, members write down at the end: losses, logged values, gradients of some
steps, hashes of every tensor after each step.

A job whose first view has all members, and that goes on with fewer, needs two schedulers, one after the other, on one
chain: the first one waits for all, the second one goes on with two. `PipelineJob.found` does so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import xxhash
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.victims import write_out
from benchmarks.workers import Scheduler, scratch
from chaos_lightning.control.requests import fetch_all
from chaos_lightning.errors import DeadlineError
from chaos_lightning.events.events import Record
from chaos_lightning.member.part_moves import PartMoves
from chaos_lightning.member.shell import Shell
from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.executor import PipelineExecutor
from chaos_lightning.pipeline.shares import ShareAttempt, ShareStep
from chaos_lightning.pipeline.step import PipelineStep
from chaos_lightning.planning.pipelines.files import to_dict
from chaos_lightning.planning.pipelines.job import TrainingJob
from chaos_lightning.protocol.codec import decode_peer
from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.strategies import ChaosPipelineStrategy, ChaosStrategy
from chaos_lightning.testing.demo.train import GPT, prose
from chaos_lightning.testing.harness import Harness
from chaos_lightning.transport.links import Links
from lab.timed_layers import TimedModel

PLACES = (
    "forward", "backward", "between", "all-reduce", "contributed", "handing out", "optimizer", "recovery", "pull",
)  # fmt: skip
"""Places at which a member may strike itself: within a forward or backward pass, before a unit, while it waits for
sums, between its contribution and the header, as the root when one member has the header, between the header and the
optimizer, when a recovery begins, and while it pulls a part."""
GATE_S = 0.005


class Strikes:
    """Kills or freezes its own process at the place in a step that a file names (one of `PLACES`).

    Args:
        path: Path of the file: {"place", "kind"}, and if need be "step" and "unit", numbers that must have been
            reached. Of several places, separated by commas, the first that is passed counts.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._step, self._unit = path, 0, -1
        self.engine: Callable[[], Any] = lambda: None

    def at(self, place: str) -> None:
        """Kills or freezes the process if the file names this place, which training has just reached."""
        if not self._asks(place):
            return
        kind = self._asked["kind"]
        self._path.unlink()
        engine = self.engine()
        engine.events.emit("fault_injected", kind=kind, node=engine.name, phase=place, step=self._step)
        os.kill(os.getpid(), signal.SIGKILL if kind == "sigkill" else signal.SIGSTOP)

    def _asks(self, place: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            self._asked = json.loads(self._path.read_text())
            due = self._step >= self._asked.get("step", 0) and self._unit >= self._asked.get("unit", -1)
            return bool(due and place in self._asked["place"].split(", "))
        return False

    def begin(self, step: int) -> None:
        """Notes that the units of a step begin, also when the step is done again."""
        self._step, self._unit = step, -1

    def unit(self) -> None:
        """Notes that the next unit of a step begins."""
        self._unit += 1
        self.at("between")

    def watch(self, blocks: Any) -> None:
        """Adds hooks to the model's blocks, so that a fault can hit within their forward or backward passes."""

        def forward(block: Any, arguments: Any, output: Any) -> None:
            self.at("forward")
            if output.requires_grad:
                output.register_hook(lambda gradient: self.at("backward"))

        for block in blocks:
            block.register_forward_hook(forward)

    def install(self) -> None:
        """Adds hooks to the product's classes in this process, so that a fault can hit at each place."""
        _before(PipelineExecutor, "run", lambda executor, work: self.begin(work.step))
        _before(PipelineExecutor, "_run_unit", lambda *_: self.unit())
        _before(PipelineStep, "_await_reduced", lambda *_: self.at("all-reduce"))
        _before(PipelineStep, "end", lambda *_: self.at("recovery"))
        _before(PartMoves, "_pull", lambda *_: self.at("pull"))
        _before(ShareAttempt, "__call__", lambda *_: self.begin(self.engine().header.step + 1))
        _before(ShareAttempt, "_run", lambda *_: self.unit())
        _before(ShareStep, "flush", lambda *_: self.at("all-reduce"))
        _before(ShareStep, "end", lambda *_: self.at("recovery"))
        contribute, message = Shell.contribute, Links.message

        def contributed(shell: Any, contribution: Any) -> None:
            contribute(shell, contribution)
            if contribution.kind is Kind.STEP and self._asks("contributed"):
                write_out(shell.links)
                self.at("contributed")

        def sent(links: Any, peer: str, payload: bytes, *ways: Any) -> None:
            message(links, peer, payload, *ways)
            if self._asks("handing out"):
                value = decode_peer(payload)
                if isinstance(value, Header) and value.kind is Kind.STEP:
                    write_out(links)
                    self.at("handing out")

        Shell.contribute, Links.message = contributed, sent  # type: ignore[method-assign]


def _before(owner: type, name: str, act: Callable[..., object]) -> None:
    """Makes `act` be called with the arguments before each call of a method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def both(*args: Any, **named: Any) -> Any:
        act(*args)
        return original(*args, **named)

    setattr(owner, name, both)


# ------------------------------------------------------------------------------------------------ a member


class FixedGPT(GPT):
    """The demo's GPT with fixed initial values, so that training in one process and by members begins alike."""

    def configure_model(self) -> None:
        if hasattr(self, "blocks"):
            return
        super().configure_model()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                waves = torch.sin(torch.arange(1.0, parameter.numel() + 1) * (1.7 + number))
                parameter.copy_(waves.view(parameter.shape) * 0.05 + (parameter.dim() == 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("tokens", float(batch[0].numel()), on_step=True, on_epoch=True, reduce_fx="sum")
        return loss


class Watch(pl.Callback):
    """Callback that records the values to compare, waits at gates, and ends training when a file says so.

    Args:
        spec: Settings of the member.
        strikes: Faults of the member's process.
    """

    def __init__(self, spec: dict[str, Any], strikes: Strikes) -> None:
        self._spec, self._strikes, self._folder, self._batches = spec, strikes, Path(spec["folder"]), 0
        self.rows: dict[int, dict[str, Any]] = {}
        self.request = ""
        self.gradients: dict[int, dict[str, Any]] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._strikes.watch(getattr(module, str(getattr(module, "chaos_chain"))))  # noqa: B009

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if resave := self._spec.pop("resave", None):
            trainer.save_checkpoint(resave)
        while (self._folder / f"gate-{trainer.global_step}").exists():
            time.sleep(GATE_S)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        session = getattr(trainer.strategy, "session", None)
        self.request = session.hooks.request if session is not None else ""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        self._strikes.at("optimizer")
        if (step := trainer.global_step + 1) in self._spec.get("gradients", ()):
            present = ((n, p.grad) for n, p in module.named_parameters() if p.grad is not None and not is_absent(p))
            self.gradients[step] = {name: gradient.clone() for name, gradient in present}

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        accumulate = trainer.accumulate_grad_batches
        step = trainer.global_step if accumulate == 1 else -(-self._batches // accumulate)
        row = self.rows.setdefault(step, {"loss": 0.0})
        row["loss"] += float(outputs["loss"])  # of plain Lightning's micro-batches each has its share
        row["logged"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
        if self._spec.get("hashes"):
            row["hashes"] = {n: xxhash.xxh3_128_hexdigest(t.detach().numpy()) for n, t in tensors_of(module).items()}
        with contextlib.suppress(FileNotFoundError, ValueError):
            trainer.should_stop = step >= int((self._folder / "end").read_text())


def tensors_of(module: Any) -> dict[str, Any]:
    """Returns the tensors whose memory this member has allocated, by name."""
    return {name: t for name, _, _, t in named_tensors(module) if not is_absent(t)}


def count_kept() -> list[int]:
    """Starts counting the tensors that units keep; returns the list to which each attempt's peak is added."""
    make, execute, peaks = PipelineExecutor.__init__, PipelineExecutor.run, list[int]()

    def counted(executor: Any, *args: Any, **named: Any) -> None:
        make(executor, *args, **named, counted=True)

    def ran(executor: Any, work: Any) -> Any:
        sums = execute(executor, work)
        peaks.append(sums.peak_nbytes)
        return sums

    PipelineExecutor.__init__, PipelineExecutor.run = counted, ran  # type: ignore[method-assign]
    return peaks


def module_of(spec: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the model and the data that a member's specification names."""
    about = dict(spec["model"])
    if about.pop("kind") == "timed":
        width, generator = about["width"], torch.Generator().manual_seed(3)
        return TimedModel(**about), TensorDataset(torch.randn(4096, width, generator=generator))
    text = prose(about["block"], spec["text"])[0]
    return FixedGPT(**about), Subset(text, range(spec.get("samples", len(text))))


def member(spec: dict[str, Any], *callbacks: pl.Callback) -> None:
    """Runs one member of a job, or the whole training in one process.

    Args:
        spec: name, folder, model (kind: gpt or timed, and arguments), batch, micro_batches; steps, clip, double
            (precision), hashes, gradients (of which steps), text (bytes). Of a member also endpoint, policy,
            device_memory, profile; counted (the tensors that units keep). strategy: "auto" for plain Lightning.
            rule: batch of fixed size, for strategy `chaos`; sample_s: added to each sample, in seconds.
            saves (folder of checkpoints), save_every (steps); ckpt_path, and resave: where it is saved at once;
            samples: of the text.
        callbacks: More of them.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.set_default_dtype(torch.float64 if spec.get("double") else torch.float32)
    warnings.simplefilter("ignore")
    strikes = Strikes(Path(spec["folder"]) / f"strike-{spec['name']}")
    watch = Watch(spec, strikes)
    accumulate, strategy = spec["micro_batches"], spec.get("strategy")
    peaks = count_kept() if spec.get("counted") else [0]
    if strategy is None:
        strikes.install()
        accumulate, strategy = 1, _strategy(spec)
        strikes.engine = lambda: strategy.session.member.engine
    pl.seed_everything(7, verbose=False)
    module, data = module_of(spec)
    module.sample_s = spec.get("sample_s", 0.0)
    saves = []
    if "saves" in spec:
        saves = [ModelCheckpoint(spec["saves"], "{step}", every_n_train_steps=spec["save_every"], save_top_k=-1)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=-1,
        max_steps=spec.get("steps", -1), callbacks=[watch, *callbacks, *saves], gradient_clip_val=spec.get("clip"),
        logger=False, enable_checkpointing=bool(saves), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(data, batch_size=spec["batch"], shuffle=False, drop_last=True)
    trainer.fit(module, loader, ckpt_path=spec.get("ckpt_path"))
    found = {n: t.detach().clone() for n, t in tensors_of(module).items()}
    report = {"rows": watch.rows, "gradients": watch.gradients, "tensors": found, "peak_nbytes": max(peaks)}
    report["request"] = watch.request
    torch.save(report, Path(spec["folder"]) / f"{spec['name']}.pt")


def _strategy(spec: dict[str, Any]) -> Any:
    options = {"host_scheduler": False, "join_timeout_s": 60.0, "step_timeout_s": 60.0, **spec.get("options", {})}
    about = {key: spec[key] for key in ("endpoint", "name")} | {"log_dir": os.environ["CHAOS_LOG_DIR"]}
    about["min_nodes"] = spec.get("min_nodes", 1)
    if "rule" in spec:
        return ChaosStrategy(**about, options={**options, "batch": spec["rule"]})
    return ChaosPipelineStrategy(
        micro_batches=spec["micro_batches"],
        policy=spec.get("policy", "adaptive"),
        device_memory=spec.get("device_memory"),
        profile=spec.get("profile", ""),
        options=options,
        **about,
    )


# ------------------------------------------------------------------------------------------------ the job


class PipelineJob:
    """A job of members that train pipelines.

    Args:
        harness: Harness that starts and watches the members.
        about: Settings that all members get.
        entry: Function that runs a member in its process.
    """

    def __init__(self, harness: Harness, about: dict[str, Any], entry: Callable[..., None] = member) -> None:
        self.harness, self.about = harness, {**about, "folder": str(harness.directory)}
        self._entry = entry
        self._scheduler = Scheduler(
            f"{harness.directory}/chain.sqlite", log_dir=str(harness.logs), finished_s=0, join_timeout_s=60
        )

    def found(self, names: Sequence[str], least: int = 2) -> None:
        """Starts a job whose first view has these members, in this order, and which goes on with `least` of them."""
        self._scheduler.start(len(names))
        for name in names:
            self.start(name)
            self.harness.wait_for("welcomed", lambda r, name=name: r.member.startswith(f"{name}~"))
        self.harness.wait_for("attempt")
        if least == len(names):
            return
        self._scheduler.stop()
        last = self.harness.records[-1]
        self._scheduler.start(least)
        for name in names:
            self.harness.wait_until(lambda name=name: self._knows(name, last), f"{name} knows the scheduler or is dead")

    def _knows(self, name: str, since: Record) -> bool:
        """Returns whether a member has connected to the scheduler since an event, or was ever hit by a fault."""
        its = [r for r in self.harness.records if r.member.startswith(f"{name}~")]
        return any(r.name == "fault_injected" or (r.name == "scheduler" and r.mono > since.mono) for r in its)

    def again(self, names: Sequence[str], **more: Any) -> None:
        """Starts all members anew and at once, as a launcher does after a job that ended in order to restart."""
        since = self.harness.records[-1]
        self._scheduler.stop()
        self._scheduler.start(len(names))
        for name in names:
            self.start(name, **more)
        self.harness.wait_for("attempt", after=since)

    def facts(self) -> dict[str, Any]:
        """Returns the scheduler's status of the job."""
        return fetch_all(self._scheduler.endpoint, Credentials.load("", ""), 5.0)

    def start(self, name: str, **more: Any) -> None:
        """Starts a member of this name."""
        spec = {**self.about, "endpoint": self._scheduler.endpoint, "name": name, **more}
        self.harness.start_function(name, self._entry, spec)

    def strike(self, name: str, place: str, kind: str = "sigkill", **at: int) -> None:
        """Orders a member to kill or freeze itself; see `Strikes`."""
        self.harness.declare(name)
        path = self.harness.directory / f"strike-{name}"
        path.with_suffix(".new").write_text(json.dumps({"place": place, "kind": kind, **at}))
        path.with_suffix(".new").replace(path)

    def struck(self, name: str, since: Record | None = None) -> Record:
        """Waits until a member has killed or frozen itself."""
        found = self.harness.wait_for("fault_injected", node=name, after=since)
        child = self.harness.children[name]
        child.killed, child.frozen = found["kind"] == "sigkill", found["kind"] == "sigstop"
        return found

    def end(self, margin: int = 8) -> None:
        """Orders all members to finish at one step."""
        last = max((int(r["step"]) for r in self.harness.records if r.name == "committed"), default=0)
        (self.harness.directory / "end").write_text(str(last + margin))

    def report(self, name: str) -> dict[str, Any]:
        """Returns the report that a member wrote as it ended."""
        found: dict[str, Any] = torch.load(self.harness.directory / f"{name}.pt", weights_only=False)
        return found

    def close(self) -> None:
        self._scheduler.stop()


@contextlib.contextmanager
def pipeline_job(
    keep: str = "", *, deadline_s: float = 90.0, entry: Callable[..., None] = member, **about: Any
) -> Iterator[PipelineJob]:
    """Yields a job with a folder, a harness and a scheduler of its own.

    Args:
        keep: Folder that is kept; "": a new one, which is removed.
        deadline_s: Deadline of every wait, in seconds.
        entry: Function that runs a member in its process.
        about: Settings that all members get; a `profile` may be a `TrainingJob`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(keep) if keep else stack.enter_context(scratch())
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(profile := about.get("profile"), TrainingJob):
            about["profile"] = str(folder / "profile.json")
            (folder / "profile.json").write_text(json.dumps(to_dict(profile)))
        harness = stack.enter_context(Harness(folder, deadline_s=deadline_s))
        job = PipelineJob(harness, about, entry)
        stack.callback(job.close)
        yield job


def alone(keep: str = "", **about: Any) -> dict[str, Any]:
    """Runs the training in one process without interruption, and returns its report.

    Args:
        keep: Folder that is kept; "": a new one, which is removed.
        about: Settings, as for `pipeline_job`; with strategy="auto" plain Lightning trains.
    """
    with pipeline_job(keep, **about) as job:
        if about.get("strategy") is None:
            job._scheduler.start(1)
        job.start("alone")
        if (code := job.harness.wait_exit("alone", 600.0)) != 0:
            raise DeadlineError(f"the training in one process ended with exit code {code}\n{job.harness.dump()}")
        return job.report("alone")
