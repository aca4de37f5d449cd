"""Provides what training loops need around the engine, both Lightning's loop and the user's own.

Theory of operation. The engine knows of gradients, slots and state. What surrounds it is the same for every loop that
trains a torch model: which buffers a step averages, which modules and optimizers no step can serve, how averaged
gradients are clipped, and how long a thread of Python's keeps the interpreter.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.data.steps import JobLoader
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.member.engine import Engine
from chaos_lightning.replication.access import unique


def reduced_buffers(module: nn.Module, names: Iterable[str] = (), *, named_by: str = "") -> list[tuple[str, Tensor]]:
    """Returns the buffers that are averaged with each step because forward passes change them (protocol.md 21).

    Args:
        module: The model; running statistics of its normalisation layers are among these buffers.
        names: Names of further buffers.
        named_by: Name of the setting with `names`, for the message.

    Raises:
        StateError: The module has no buffer of such a name.
    """
    wanted = set(names)
    found = []
    for prefix, child in module.named_modules():
        tracked = isinstance(child, nn.modules.batchnorm._NormBase) and child.track_running_stats
        for name, buffer in child.named_buffers(prefix=prefix, recurse=False):
            if tracked or name in wanted:
                found.append((name, buffer))
                wanted.discard(name)
    if wanted:
        raise StateError(f"{named_by} names {sorted(wanted)}, which the module has not")
    return unique(found)


def least_batch(module: nn.Module) -> int:
    """Returns the smallest batch that the model can train on: 2 with BatchNorm, which has no variance for one sample;
    else 1.
    """
    return 2 if any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules()) else 1


@dataclass(frozen=True)
class Unserved:
    """Kind of module that is unsupported because no step of a job can synchronize it.

    Attributes:
        what: The kind, as a user would name it.
        why: Why it cannot be served, and what to do instead.
        found: Whether this module is of that kind, its children apart.
    """

    what: str
    why: str
    found: Callable[[nn.Module], bool]


UNSERVED = (
    Unserved(
        "SyncBatchNorm",
        "it uses torch.distributed inside the forward pass, where members may be idle or gone; use BatchNorm",
        lambda m: isinstance(m, nn.SyncBatchNorm),
    ),
    Unserved(
        "lazy modules",
        "newcomers need the parameters' shapes before the first batch; run one batch through the module before",
        lambda m: any(nn.parameter.is_lazy(p) for p in m.parameters(recurse=False)),
    ),
    Unserved(
        "sparse gradients",
        "gradients are reduced in place as dense memory; use sparse=False",
        lambda m: isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse,
    ),
)

SHARDED = "every member holds the whole state, so that any of them may die; use the plain optimizer"


def is_sharded(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer's state is sharded over processes, which would be lost with a member."""
    return hasattr(optimizer, "consolidate_state_dict")


@dataclass(frozen=True)
class Clipping:
    """Rule by which averaged gradients are clipped before the optimizer's step; calling it with the optimizer clips
    them.

    Attributes:
        norm: Bound for the norm of all gradients together, as of `clip_grad_norm_`; None: it is not looked at.
        value: Bound for each number, as of `clip_grad_value_`.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.norm is not None and self.value is not None:
            raise ConfigurationError(
                f"clip_norm={self.norm} and clip_value={self.value} were given; give one: gradients are clipped once"
            )
        for word, bound in (("clip_norm", self.norm), ("clip_value", self.value)):
            if bound is not None and not bound > 0:
                raise ConfigurationError(f"{word}={bound}; expected a number above 0, or None for no clipping")

    def __str__(self) -> str:
        return ", ".join(f"{n} {float(v)}" for n, v in (("norm", self.norm), ("value", self.value)) if v) or "none"

    def __call__(self, optimizer: Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if self.norm is not None:
            nn.utils.clip_grad_norm_(params, self.norm)
        if self.value is not None:
            nn.utils.clip_grad_value_(params, self.value)


def tell_epoch(engine: Engine, loader: JobLoader, epoch: int) -> None:
    """Logs the length of an epoch at its beginning, so that a report can check that all of it was used.

    Args:
        engine: Engine of a member that is in the job.
        loader: Data loader; nothing is logged if the length is unknown.
        epoch: Number of the epoch.
    """
    length = loader.length(epoch)
    if length is not None:
        engine.events.emit("epoch", stream=loader.stream, epoch=epoch, length=length)


_SWITCH_INTERVAL_S = 5e-4
_switching = threading.Lock()
_trainings, _interval_before_s = 0, 0.0


def switch_quickly() -> Callable[[], None]:
    """Makes Python switch threads after 0.5 ms while a process trains (`sys.setswitchinterval`).

    The I/O thread needs it for microseconds, often; with Python's default it would wait 5 ms each time.

    Returns:
        Ends it; idempotent. At the end of the last training of the process the interval is what it was before the first
        one, unless somebody else has set it meanwhile.
    """
    global _trainings, _interval_before_s
    with _switching:
        if not _trainings:
            _interval_before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_interval_before_s, _SWITCH_INTERVAL_S))
        _trainings += 1
    ended = False

    def end() -> None:
        nonlocal ended
        global _trainings
        with _switching:
            _trainings -= not ended
            if not ended and not _trainings and sys.getswitchinterval() <= _SWITCH_INTERVAL_S:
                sys.setswitchinterval(_interval_before_s)
            ended = True

    return end
