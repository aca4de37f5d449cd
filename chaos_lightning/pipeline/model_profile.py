"""Writes a model's measurements as a file for the planner, with devices, links, and a check of the estimated step time.

Theory of operation. `ModelProfile` is what a process measured; it travels as JSON to the command that asked for it. A
`ProfiledFleet` says on what the model is to run: this machine, or the members of a running job with their measured
links. What units and the end of a step cost beside layers only those members know, who want their machine's processors
at once; a process by itself knows what lies between two of its own steps. Links that differ little from the others of
their kind are given as one rate, since plans for equal links are exact. Layers that took no time, such as the backward
pass of frozen ones, get `LEAST_S`, because the planner divides by times.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_lightning.machine.units import duration
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.files import read_job
from chaos_lightning.planning.pipelines.job import Layer, Overheads
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage

LEAST_S = 1e-9
UNKNOWN = "links cost nothing until you write them (within_host, between_hosts)"
ALIKE = 1.25
"""Ratio of rates up to which two links count as alike."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Measurements of a model made by one process."""

    chain: str
    """Path of the list of blocks; "": the model itself."""
    kind: str
    """Class of the blocks."""
    layers: tuple[Layer, ...]
    micro_batches: int
    """Number of micro-batches in one optimizer step of the script."""
    samples: int
    """Number of samples in one micro-batch."""
    tied_nbytes: int
    step_s: float
    """Median seconds of a step without measuring layers: forward and backward passes, and the optimizer."""
    period_s: float
    """Median seconds from one step to the next, what lies between them included."""
    device: str
    devices: int
    """Number of devices of this kind on this machine."""
    memory_nbytes: int
    """Bytes of memory of one device."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ModelProfile:
        about = json.loads(text)
        layers = tuple(Layer(**x) for x in about.pop("layers"))
        return ModelProfile(layers=layers, notes=tuple(about.pop("notes")), **about)


@dataclass(frozen=True, kw_only=True)
class ProfiledFleet:
    """Devices and links, as entries of the planner's file."""

    devices: tuple[Mapping[str, Any], ...]
    within_host: Mapping[str, Any] = field(default_factory=dict)
    between_hosts: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[Mapping[str, Any], ...] = ()
    overheads: Mapping[str, float] | None = None
    """Measured costs of steps beyond layers; None: no job with pipelines has measured any."""
    words: str = ""
    """Origin of the fleet's devices and links, in words."""


def this_machine(profile: ModelProfile) -> ProfiledFleet:
    """Returns the devices of this machine as a fleet; its links are not known."""
    count = profile.devices
    one = {"name": "d", "count": count, "per_host": count, "memory_nbytes": profile.memory_nbytes}
    words = f"{count} x {profile.device} of this machine; {UNKNOWN}"
    return ProfiledFleet(devices=(one,), words=words)


def fleet_of_job(facts: Mapping[str, Any], profile: ModelProfile) -> ProfiledFleet | None:
    """Returns a running job's members as a fleet of devices like the measured one, with their links; None if there are
    no members.

    Args:
        facts: Output of `chaos-lightning status --json --all` for the job.
        profile: Profile of the model. On a CPU the members of one machine share its memory.
    """
    machine = facts.get("machine", {})
    hosts = {str(m["id"]): str(m["host"]) for m in machine.get("members", ())}
    if not hosts:
        return None
    on_host = Counter(hosts.values())
    names = {host: f"host{i}" for i, host in enumerate(on_host)}
    shared = on_host if profile.device == "cpu" else dict.fromkeys(on_host, 1)
    devices = tuple(
        {"name": name, "host": names[host], "memory_nbytes": profile.memory_nbytes // shared[host]}
        for name, host in hosts.items()
    )
    rows = [r for r in machine.get("links", ()) if r["there_bps"] and r["a"] in hosts and r["b"] in hosts]
    usual, special = dict[bool, Mapping[str, Any]](), list[Mapping[str, Any]]()
    for within in (True, False):
        ours = [r for r in rows if (hosts[r["a"]] == hosts[r["b"]]) is within]
        if ours:
            usual[within], odd = _usual(ours)
            special += odd
    words = f"{len(devices)} members of job {facts.get('job', '?')}, {len(rows)} links between them as measured"
    words += "" if rows else f"; {UNKNOWN}"
    if (overheads := machine.get("overheads")) is not None:
        words += (
            f"; beside layers a unit takes {duration(overheads['unit_s'])} and a step {duration(overheads['commit_s'])}"
        )
    return ProfiledFleet(
        devices=devices, within_host=usual.get(True, {}), between_hosts=usual.get(False, {}), links=tuple(special),
        overheads=overheads, words=words,
    )  # fmt: skip


def _usual(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the median of the links, and each link that differs from it, by the slower direction."""
    rates = [min(float(r["there_bps"]), float(r["back_bps"] or math.inf)) for r in rows]
    middle = statistics.median_low(rates)
    latency = statistics.median_low(float(r["latency_s"] or 0.0) for r in rows)
    odd = [
        {"a": r["a"], "b": r["b"], "rate_bps": rate, "latency_s": float(r["latency_s"] or 0.0)}
        for r, rate in zip(rows, rates, strict=True)
        if not middle / ALIKE <= rate <= middle * ALIKE
    ]
    return {"rate_bps": middle, "latency_s": latency}, odd


def write(path: Path, profile: ModelProfile, fleet: ProfiledFleet) -> None:
    """Writes the planner's file, as JSON if its name ends in .json, else as YAML."""
    about: dict[str, Any] = {"micro_batches": profile.micro_batches, "samples": profile.samples}
    if profile.tied_nbytes:
        about["tied_nbytes"] = profile.tied_nbytes
    about["layers"] = [_told(asdict(layer)) for layer in profile.layers]
    about["devices"] = [dict(device) for device in fleet.devices]
    alone = {"commit_s": max(0.0, profile.period_s - profile.step_s)}
    if overheads := _told(alone if fleet.overheads is None else fleet.overheads):
        about["overheads"] = overheads
    for key, value in (("within_host", fleet.within_host), ("between_hosts", fleet.between_hosts)):
        if value:
            about[key] = _told(value)
    if fleet.links:
        about["links"] = [_told(link) for link in fleet.links]
    if path.suffix == ".json":
        path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return
    head = f"{len(profile.layers)} blocks of {profile.kind} in {profile.chain or 'the model'}, on {profile.device}"
    lines = [f"# Measured by chaos-lightning profile: {head}.", f"# Devices: {fleet.words}."]
    for key, value in about.items():
        rows = [f"  - {json.dumps(row)}" for row in value] if isinstance(value, list) else []
        lines += [f"{key}:", *rows] if rows else [f"{key}: {json.dumps(value)}"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _told(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the non-empty fields, with times as texts in milliseconds and rates as texts in Mbps."""
    told = dict[str, Any]()
    for key, value in about.items():
        if key.endswith("_s") and value:
            told[key] = f"{value * 1e3:.6g} ms"
        elif key.endswith("_bps"):
            told[key] = f"{value / 1e6:.6g} Mbps"
        elif value:
            told[key] = value
    return told


def estimated_s(path: Path) -> float:
    """Returns the estimated seconds of a step of a file's model on one device, without overheads."""
    job = replace(read_job(path), overheads=Overheads())
    whole = Pipeline((PlanStage(job.devices[0].name, 0, len(job.layers)),), job.micro_batches)
    return estimate(job, PipelinePlan(len(job.layers), (whole,))).step_s
