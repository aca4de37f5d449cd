"""Describes a training job for the planner: layers with times and bytes, devices, links, micro-batches.

Theory of operation. All values here are plain and frozen, and say no to what cannot be: a time below zero, a device
twice, a link to nobody. Times are seconds of one micro-batch on a device of speed 1, sizes are bytes, rates are bits
per second. A *device* is what computes one stage: a card, or a group of cards that share each layer by tensor
parallelism (`cards`). What dies together is a *loss unit*: devices with the same `unit`, by itself if it names none.
A *host* is where devices share their memory bus or their machine: it has links of its own, and is lost as a whole now
and then. `Costs` holds the sums over runs of layers, which everything else asks for a million times.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from chaos_lightning.errors import ConfigurationError

Number = TypeVar("Number", int, float)

CLOSED: dict[str, Any] = {"extra": "forbid"}
"""Configuration of pydantic for each value of a file: an unknown key is refused."""


class JobError(ConfigurationError):
    """Error in a job or fleet; says which field, what was given, what was expected."""


MOST_LAYERS, MOST_DEVICES, MOST_MICRO_BATCHES = 10_000, 100_000, 1_000_000
"""Most layers, devices and micro-batches; more are a slip of the pen: planning takes time and memory for each of
them.
"""


def check_number(where: str, value: float, *, least: float | None = None, most: float = sys.float_info.max) -> None:
    """Refuses a value that is not a finite number above 0 (or from `least` on, if given) and up to `most`.

    Raises:
        JobError: The value is no such number.
    """
    low = value >= least if least is not None else value > 0
    if not (low and value <= most):
        wanted = f"at least {least:g}" if least is not None else "above 0"
        if most < value < math.inf:
            wanted = f"at most {most:,.10g}"
        raise JobError(f"{where} is {value!r}; expected a finite number {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Layer of the model, with its times and bytes for one micro-batch."""

    __pydantic_config__ = CLOSED

    name: str
    forward_s: float
    backward_s: float
    """Seconds of both halves: the gradient of the input, and that of the weights."""
    backward_input_s: float | None = None
    """Seconds of the half that the stage before waits for; None: half of the pass."""
    parameter_nbytes: int = 0
    gradient_nbytes: int = 0
    optimizer_nbytes: int = 0
    activation_nbytes: int = 0
    """Bytes kept from the forward pass of a micro-batch to the end of its backward pass."""
    workspace_nbytes: int = 0
    """Bytes needed beside the activations while the layer computes."""
    output_nbytes: int = 0
    """Bytes that go to the next layer, and as a gradient back."""
    optimizer_s: float = 0.0
    """Seconds of the optimizer on this layer, once per step."""

    def __post_init__(self) -> None:
        where = f"layer {self.name!r}: "
        check_number(f"{where}forward_s", self.forward_s)
        check_number(f"{where}backward_s", self.backward_s)
        if self.backward_input_s is not None:
            check_number(f"{where}backward_input_s", self.backward_input_s)
            if self.backward_input_s >= self.backward_s:
                raise JobError(
                    f"{where}backward_input_s is {self.backward_input_s:g}; expected less than backward_s "
                    f"({self.backward_s:g}), of which it is a part"
                )
        check_number(f"{where}optimizer_s", self.optimizer_s, least=0)
        for f in fields(self):
            if f.name.endswith("_nbytes"):
                check_number(f"{where}{f.name}", getattr(self, f.name), least=0)

    @property
    def input_part(self) -> float:
        """Fraction of the backward pass that computes the input's gradient, which the previous stage waits for."""
        return 0.5 if self.backward_input_s is None else self.backward_input_s / self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device that computes one stage."""

    __pydantic_config__ = CLOSED

    name: str
    memory_nbytes: int
    speed: float = 1.0
    """Factor by which the layers' times are divided."""
    host: str = ""
    """Name of the device's machine; "": a machine of its own."""
    unit: str = ""
    """Name of the group that dies together with it; "": it dies alone."""
    cards: int = 1
    """Number of cards that the device is made of (tensor parallelism)."""

    def __post_init__(self) -> None:
        where = f"device {self.name!r}: "
        if not self.name:
            raise JobError("a device has no name; expected one that no other device has")
        check_number(f"{where}memory_nbytes", self.memory_nbytes)
        check_number(f"{where}speed", self.speed)
        check_number(f"{where}cards", self.cards, least=1)

    @property
    def place(self) -> str:
        """Name of the device's host; for a device without one, a unique name."""
        return self.host or f"\0{self.name}"

    @property
    def dies_with(self) -> str:
        return self.unit or f"\0{self.name}"

    @property
    def kind(self) -> tuple[float, int]:
        """Speed and memory of the device, in which devices of one kind agree."""
        return (self.speed, self.memory_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """Latency and rate of a link in one direction; with an infinite rate and no latency it costs nothing."""

    __pydantic_config__ = CLOSED

    rate_bps: float = math.inf
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate_bps > 0:
            raise JobError(f"a link's rate_bps is {self.rate_bps!r}; expected a number above 0")
        check_number("a link's latency_s", self.latency_s, least=0)

    def time_s(self, nbytes: float) -> float:
        """Returns the seconds that a message of this many bytes takes."""
        return self.latency_s + 8.0 * nbytes / self.rate_bps

    @property
    def kind(self) -> tuple[float, float]:
        return (self.rate_bps, self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLink:
    """Link between two devices or hosts, both ways, that differs from the usual ones; from a host to itself it means
    the links within the host.
    """

    __pydantic_config__ = CLOSED

    a: str
    b: str
    rate_bps: float
    latency_s: float = 0.0

    def link(self) -> LinkRate:
        return LinkRate(rate_bps=self.rate_bps, latency_s=self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Overheads of a step in seconds, beside layers and links; `calibration` fits them to measured steps."""

    __pydantic_config__ = CLOSED

    hop_s: float = 0.0
    """Seconds of each tensor that goes to another device, beside its link's time."""
    unit_s: float = 0.0
    """Seconds of each forward or backward pass of one micro-batch through one stage, beside its layers."""
    commit_s: float = 0.0
    """Seconds at the end of a step, once."""

    def __post_init__(self) -> None:
        for f in fields(self):
            check_number(f"overheads: {f.name}", getattr(self, f.name), least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Rules for the memory that an executor needs beside state and activations; the defaults are this product's."""

    __pydantic_config__ = CLOSED

    flat_buffers: int = 2
    """Copies of the gradients in flat memory: the device's own sum, and one result."""
    boundaries: bool = False
    """Whether boundary tensors that were sent are kept until the step is committed; those of the next step may be
    there, too.
    """
    in_flight_extra: int = 0
    """Micro-batches in flight beyond those of 1F1B, at each stage; plans without memory for them do not fit."""

    def __post_init__(self) -> None:
        check_number("memory: flat_buffers", self.flat_buffers, least=0)
        check_number("memory: in_flight_extra", self.in_flight_extra, least=0)


PLAIN_MEMORY = MemoryRules(flat_buffers=0, boundaries=False)
"""Rules of an executor that keeps state and activations only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Floating-point operations and tokens of a micro-batch, from which rates such as utilization are computed."""

    tokens: int
    """Tokens in one micro-batch."""
    flop: float
    """Floating-point operations of the forward and backward pass of one micro-batch, without recomputation."""
    peak_flops: float
    """Peak rate of one card of speed 1, FLOP/s."""
    assumptions: str
    """Efficiency, recomputation and bytes a parameter, in words."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """Training job: layers, devices, links and number of micro-batches."""

    __pydantic_config__ = CLOSED

    layers: tuple[Layer, ...]
    devices: tuple[Device, ...]
    micro_batches: int
    """Micro-batches of one optimizer step, over all pipelines."""
    within_host: LinkRate = field(default_factory=LinkRate)
    between_hosts: LinkRate = field(default_factory=LinkRate)
    links: tuple[NamedLink, ...] = ()
    samples: int = 1
    """Samples in one micro-batch."""
    overheads: Overheads = field(default_factory=Overheads)
    memory: MemoryRules = field(default_factory=MemoryRules)
    tied_nbytes: int = 0
    """Bytes of the gradients that the first and the last layer share, as a head does that is the embedding; 0: none."""
    work: ModelWork | None = field(default=None, compare=False)
    """Arithmetic of the model, known for models by formula; plans do not depend on it."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise JobError("layers is empty; expected at least one layer")
        if not self.devices:
            raise JobError("devices is empty; expected at least one device")
        check_number("the number of layers", len(self.layers), most=MOST_LAYERS)
        check_number("the number of devices", len(self.devices), most=MOST_DEVICES)
        check_number("micro_batches", self.micro_batches, least=1, most=MOST_MICRO_BATCHES)
        check_number("samples", self.samples, least=1)
        check_number("tied_nbytes", self.tied_nbytes, least=0)
        known: set[str] = set()
        for d in self.devices:
            if d.name in known:
                raise JobError(f"devices: the name {d.name!r} is given twice; expected each device to have its own")
            known.add(d.name)
        hosts = {d.host for d in self.devices if d.host}
        if both := sorted(known & hosts):
            raise JobError(f"devices: {both[0]!r} is a device and a host; expected another name for one of them")
        pairs: set[frozenset[str]] = set()
        for link in self.links:
            pair = frozenset((link.a, link.b))
            if pair in pairs:
                raise JobError(f"links: {link.a}-{link.b} is given twice, in one direction or both; expected it once")
            pairs.add(pair)
            if link.a == link.b and link.a in known:
                raise JobError(f"links: {link.a}-{link.b} leads from a device to itself; expected another one")
            check_number(f"links: {link.a}-{link.b}: rate_bps", link.rate_bps)
            for end in (link.a, link.b):
                if end not in known and end not in hosts:
                    raise JobError(
                        f"links: {link.a}-{link.b} leads to {end!r}, which is no device and no host; "
                        f"expected one of {', '.join(sorted(known | hosts)[:8])}"
                    )

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.layers)

    @cached_property
    def by_name(self) -> dict[str, Device]:
        return {d.name: d for d in self.devices}

    @cached_property
    def _special(self) -> dict[tuple[str, str], LinkRate]:
        return {pair: x.link() for x in self.links for pair in ((x.a, x.b), (x.b, x.a))}

    def link(self, a: str, b: str) -> LinkRate:
        """Returns the link from device `a` to device `b`: the one named for these devices or their hosts, else the
        usual one.
        """
        x, y = self.by_name[a], self.by_name[b]
        if self._special:
            for pair in ((a, b), (a, y.host), (x.host, b), (x.host, y.host)):
                if pair in self._special:
                    return self._special[pair]
        return self.within_host if x.place == y.place else self.between_hosts

    @property
    def alike(self) -> bool:
        """Whether all devices are of one kind and all links are the usual ones."""
        return len({d.kind for d in self.devices}) == 1 and not self.links

    def with_devices(self, devices: Sequence[Device]) -> TrainingJob:
        """Returns the same job on other devices; named links to devices that are gone are dropped."""
        there = {d.name for d in devices} | {d.host for d in devices}
        links = tuple(x for x in self.links if x.a in there and x.b in there)
        job = replace(self, devices=tuple(devices), links=links)
        job.__dict__["costs"] = self.costs
        return job

    def without(self, lost: Sequence[str]) -> TrainingJob:
        """Returns the same job without these devices.

        Raises:
            JobError: A device is not there, or no device is left.
        """
        for name in lost:
            if name not in self.by_name:
                raise JobError(f"{name!r} is no device; expected one of {', '.join(sorted(self.by_name)[:8])}")
        gone = set(lost)
        left = [d for d in self.devices if d.name not in gone]
        if not left:
            raise JobError(f"all {len(self.devices)} devices are lost; expected one to be left")
        return self.with_devices(left)


class Costs:
    """Prefix sums over the layers, for fast sums of times and bytes over layers [first, end)."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.count = len(self.layers)

        def sums(values: list[Number]) -> list[Number]:
            found = [values[0] * 0]
            for x in values:
                found.append(found[-1] + x)
            return found

        self.forward = sums([x.forward_s for x in layers])
        self.backward = sums([x.backward_s for x in layers])
        self.backward_input = sums([x.backward_s * x.input_part for x in layers])
        self.parameters = sums([x.parameter_nbytes for x in layers])
        self.gradients = sums([x.gradient_nbytes for x in layers])
        self.optimizer = sums([x.optimizer_nbytes for x in layers])
        self.activations = sums([x.activation_nbytes for x in layers])
        self.optimizer_s = sums([x.optimizer_s for x in layers])
        self.outputs = tuple(x.output_nbytes for x in layers)
        self._workspace = [[x.workspace_nbytes for x in layers]]
        while 1 << len(self._workspace) <= self.count:
            half, last = 1 << (len(self._workspace) - 1), self._workspace[-1]
            self._workspace.append([max(a, b) for a, b in zip(last, last[half:], strict=False)])

    def workspace(self, first: int, end: int) -> int:
        """Returns the largest workspace among some consecutive layers, in bytes."""
        level = (end - first).bit_length() - 1
        row = self._workspace[level]
        return max(row[first], row[end - (1 << level)])

    def boundary_in(self, first: int) -> int:
        """Returns the bytes of the tensor that enters a layer; 0 for the first layer, whose samples do not count."""
        return self.outputs[first - 1] if first else 0

    def boundary_out(self, end: int) -> int:
        return self.outputs[end - 1] if end < self.count else 0

    def state(self, first: int, end: int) -> int:
        """Returns the bytes of weights and optimizer state that a new owner of layers [first, end) needs."""
        return int(self.parameters[end] - self.parameters[first] + self.optimizer[end] - self.optimizer[first])


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak bytes of one device, by purpose."""

    state: int = 0
    """Bytes of parameters, gradients and optimizer state."""
    buffers: int = 0
    """Bytes of flat copies of the gradients."""
    activations: int = 0
    workspace: int = 0
    boundaries: int = 0
    """Bytes of boundary tensors kept until the step is committed, and of those of the next step."""

    @property
    def nbytes(self) -> int:
        return self.state + self.buffers + self.activations + self.workspace + self.boundaries


def stage_memory(job: TrainingJob, first: int, end: int, in_flight: int, micro_batches: int) -> MemoryUse:
    """Returns the peak memory of a device that owns layers [first, end) and runs `micro_batches` through them in each
    step.

    Args:
        job: The job.
        first: First layer.
        end: One behind the last layer.
        in_flight: Most micro-batches whose activations are there at once.
        micro_batches: Micro-batches that pass the device in one step.
    """
    c, rules = job.costs, job.memory
    gradients = c.gradients[end] - c.gradients[first]
    kept = 2 * c.boundary_in(first) + c.boundary_out(end) if rules.boundaries else 0
    return MemoryUse(
        state=c.state(first, end) + gradients,
        buffers=rules.flat_buffers * gradients,
        activations=in_flight * (c.activations[end] - c.activations[first]),
        workspace=c.workspace(first, end),
        boundaries=micro_batches * kept,
    )
