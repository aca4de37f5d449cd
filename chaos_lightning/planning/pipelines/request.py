"""Defines the request of a member that wants its job to run in pipelines: the measured model, the member's device, and
rules.

Theory of operation. Each member says so in every hello, as text (`Hello.pipelines`). So a scheduler that is started
anew knows all of it again, and nothing has to be stored. All members of a job must agree in `terms`; times and sizes
may differ, since each member measures for itself: those of the oldest member count. The job has one device, which is
the member's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from chaos_lightning.planning.pipelines.files import job_of, to_dict
from chaos_lightning.planning.pipelines.job import Device, JobError, TrainingJob
from chaos_lightning.planning.pipelines.units import MAX_LAYERS, MAX_STAGED

PIPELINE_POLICIES = ("adaptive", "reroute", "dynamic", "restart")
"""Policies of a running job. `restart` ends the job at a loss, so that it begins again from a checkpoint."""
ON_LOST_PARTS = ("wait", "end")
"""Ways to meet the loss of parts of the training state: all wait for an operator, or the job ends."""
_SOURCE = "a request for pipelines"
_KEYS = frozenset({"copies", "job", "on_lost_parts", "policy", "shared"})
_REQUESTS = 16
"""Number of texts that are remembered as read: one hello asks for the same one several times."""


@dataclass(frozen=True)
class PipelineRequest:
    """Request of a member for pipelines: its measured model, its device, and rules."""

    job: TrainingJob
    """Layers with their costs, micro-batches, overheads and memory rules; and one device, the member's own."""
    policy: str
    """One of PIPELINE_POLICIES."""
    copies: int
    """Owners that each layer is to have, as far as memory allows."""
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Layers that use a parameter together, in order, by its name."""
    on_lost_parts: str = "wait"
    """One of ON_LOST_PARTS."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("policy", self.policy, PIPELINE_POLICIES),
            ("on_lost_parts", self.on_lost_parts, ON_LOST_PARTS),
        ):
            if given not in known:
                raise JobError(f"{_SOURCE}: {name} is {given!r}; expected one of {', '.join(known)}")
        if type(self.copies) is not int or self.copies < 1:
            raise JobError(f"{_SOURCE}: copies is {self.copies!r}; expected a whole number of at least 1")
        if len(self.job.devices) != 1:
            raise JobError(f"{_SOURCE}: {len(self.job.devices)} devices are given; expected the member's own alone")
        if self.job.links:
            raise JobError(f"{_SOURCE}: links are given; expected within_host and between_hosts alone")
        layers, micro_batches = self.layer_count, self.job.micro_batches
        if micro_batches > MAX_LAYERS or layers * micro_batches > MAX_STAGED:
            raise JobError(
                f"{_SOURCE}: {layers} layers in {micro_batches} micro-batches; expected at most {MAX_LAYERS} "
                f"micro-batches, and a product of at most {MAX_STAGED}"
            )
        if len(self.shared) >= MAX_LAYERS:
            raise JobError(f"{_SOURCE}: {len(self.shared)} shared parameters; expected fewer than {MAX_LAYERS}")
        for name, users in self.shared.items():
            known_layers = all(type(x) is int and 0 <= x < layers for x in users)
            if not known_layers or len(users) < 2 or list(users) != sorted(frozenset(users)):
                raise JobError(
                    f"{_SOURCE}: parameter {name!r} is shared by layers {list(users)[:9]}; expected two or more of "
                    f"{layers} layers, each once, in order"
                )

    @property
    def layer_count(self) -> int:
        """Number of the model's layers."""
        return len(self.job.layers)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the model's layers, in order."""
        return tuple(layer.name for layer in self.job.layers)

    @property
    def ends_without_parts(self) -> bool:
        """Whether the job ends when parts of the training state are lost; otherwise all members wait for the parts to
        return.
        """
        return self.on_lost_parts == "end" or self.policy == "restart"

    @property
    def device(self) -> Device:
        """Device of the member."""
        return self.job.devices[0]

    @property
    def work_s(self) -> float:
        """Seconds that one micro-batch takes through all layers, forward and backward, on the member's device."""
        costs = self.job.costs
        return (costs.forward[-1] + costs.backward[-1]) / self.device.speed

    @property
    def terms(self) -> tuple[tuple[str, str], ...]:
        """Values that must be equal at all members of a job, as (name, value) in a fixed order."""
        shared = "; ".join(f"{name} by layers {', '.join(map(str, x))}" for name, x in sorted(self.shared.items()))
        return (
            ("the number of layers", str(self.layer_count)),
            ("the number of micro-batches", str(self.job.micro_batches)),
            ("policy", self.policy),
            ("copies", str(self.copies)),
            ("on_lost_parts", self.on_lost_parts),
            ("what layers share", shared or "nothing"),
        )

    def __str__(self) -> str:
        return f"{self.layer_count} layers in {self.job.micro_batches} micro-batches"

    # ------------------------------------------------------------------------------------------------ as text

    def to_json(self) -> str:
        """Returns the request as the shortest JSON text; equal requests have equal texts."""
        about: dict[str, Any] = {"job": to_dict(self.job), "policy": self.policy, "copies": self.copies}
        about["on_lost_parts"] = self.on_lost_parts
        if self.shared:
            about["shared"] = {name: list(layers) for name, layers in self.shared.items()}
        return json.dumps(about, separators=(",", ":"), sort_keys=True, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> PipelineRequest:
        """Returns the request from the JSON text that `to_json` made.

        Raises:
            JobError: The text is no request; says which field, what was given and what was expected.
        """
        try:
            about = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise JobError(f"{_SOURCE} cannot be read: {error}; expected what to_json() wrote") from None
        if not isinstance(about, dict) or not _KEYS - {"shared"} <= set(about) <= _KEYS:
            given = sorted(about) if isinstance(about, dict) else type(about).__name__
            raise JobError(f"{_SOURCE} has {str(given)[:200]}; expected the keys {', '.join(sorted(_KEYS))}")
        shared = about.get("shared", {})
        if not isinstance(shared, dict) or not all(isinstance(layers, list) for layers in shared.values()):
            raise JobError(f"{_SOURCE}: shared is {str(shared)[:200]}; expected lists of layers by parameter")
        _check_plain(about["job"])
        return PipelineRequest(
            job=job_of(about["job"], _SOURCE),
            policy=about["policy"],
            copies=about["copies"],
            shared={name: tuple(layers) for name, layers in sorted(shared.items())},
            on_lost_parts=about["on_lost_parts"],
        )


def _check_plain(job: Any) -> None:
    """Refuses entries that expand to several layers or devices, so that a short text cannot make a large job.

    Raises:
        JobError: The text stands for too much.
    """
    devices = job.get("devices") if isinstance(job, dict) else None
    if not isinstance(devices, list) or len(devices) != 1 or not isinstance(devices[0], dict):
        raise JobError(f"{_SOURCE}: devices is {str(devices)[:200]}; expected the member's own device alone")
    layers = job.get("layers")
    rows = [devices[0], *(x for x in layers if isinstance(x, dict))] if isinstance(layers, list) else devices
    found = {key for row in rows for key in ("count", "per_host", "hosts", "repeat") if key in row}
    if short := sorted(found | {key for key in ("decoder", "tensor_parallel") if key in job}):
        raise JobError(f"{_SOURCE} has {short[0]!r}; expected each layer and the one device by itself")


@lru_cache(maxsize=_REQUESTS)
def read_request(text: str) -> PipelineRequest:
    """Returns the request in a text, with the last few texts cached."""
    return PipelineRequest.from_json(text)
