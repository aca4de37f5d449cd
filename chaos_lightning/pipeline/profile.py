"""Measures a model while a script trains it: forward and backward times and bytes of the layers of its chain.

Theory of operation. A `ModelProfiler` hears of every optimizer step in its process. At the first one it looks for the
model of that optimizer and for its chain (`find_chain`). From then on a micro-batch begins with the first call of
one of the model's modules, and ends with its backward pass, of which `torch.autograd.backward` tells. So the loop may
be anybody's, Lightning's too; a data loader's time belongs to no layer.

Each step has one purpose. The first one counts bytes, which is slow. `WARM_UP` steps follow, then steps whose layers
are timed and steps that are timed as a whole, in turns: the latter are what the estimator's answer is compared with.
A model or a loop that a pipeline could not run is refused by name.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from chaos_lightning.errors import ConfigurationError, UnsupportedError
from chaos_lightning.pipeline.find_chain import MOST_LISTED, check_model, find_chain, model_of
from chaos_lightning.pipeline.layer_bytes import PassBytes, StateBytes, gauge_of, state_rows
from chaos_lightning.pipeline.layer_times import LayerClock, LayerTimer, TimedPass
from chaos_lightning.pipeline.model_profile import LEAST_S, ModelProfile
from chaos_lightning.planning.pipelines.job import Layer
from chaos_lightning.replication.snapshot import available_nbytes

LEAST_STEPS, STEPS, WARM_UP = 4, 20, 3
MOST_SPREAD = 0.2
"""Spread between the quartiles of steps, as a share of their median, above which a note tells of it."""
Outcome = ModelProfile | ConfigurationError


BYTES, WARM, LAYERS, WHOLE = "bytes", "warm", "layers", "whole"
"""Purposes of a measured step."""


class ModelProfiler:
    """Measurement of the model that this process trains; it begins with the optimizer steps reported to it.

    Args:
        steps: Number of steps to measure after the warm-up; half of them by layer.
        chain: Path of the chain; "": it is looked for.
        root: The model; None: it is looked for.
        report: Function called once with the profile, or with the error that ended the measurement.
        say: Function that gets lines about the progress.
    """

    def __init__(
        self,
        *,
        report: Callable[[Outcome], None],
        steps: int = STEPS,
        chain: str = "",
        root: nn.Module | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if steps < LEAST_STEPS:
            raise ConfigurationError(f"steps is {steps}; expected at least {LEAST_STEPS}")
        self.steps, self.path, self.root = steps, chain, root
        self._report, self._say = report, say
        self._purposes = [BYTES, *[WARM] * WARM_UP, *[LAYERS, WHOLE] * (steps // 2)]
        self._at = -1  # of the purposes; below 0: the model is not known
        self._over = False
        self._optimizer: Optimizer | None = None
        self._began: Any = None  # mark of the micro-batch whose forward pass runs
        self._pass: TimedPass | None = None  # the same, where layers are looked at
        self._in_backward = False
        self._marks: list[tuple[Any, Any]] = []
        self._samples: Counter[int] = Counter()
        self._whole: list[tuple[int, float]] = []
        self._periods: list[float] = []
        self._optimizer_s: list[float] = []
        self._period_began = 0.0

    @property
    def done_steps(self) -> int:
        """Number of measured steps that are finished, without the warm-up."""
        return max(0, self._at - WARM_UP - 1)

    def attach(self) -> None:
        """Registers the hook that reports optimizer steps."""
        _listen()
        _attached.append(self)

    def detach(self) -> None:
        """Removes all hooks. Idempotent."""
        self._over = True
        if self in _attached:
            _attached.remove(self)
        if self._at >= 0:
            self._timer.detach()
            self._bytes.ends()
            self._awaiting.remove()
            if torch.autograd.backward is self._patch:
                torch.autograd.backward = self._real_backward

    def stepped(self, optimizer: Optimizer) -> None:
        """Records that an optimizer has made a step in this process."""
        if self._over:
            return
        try:
            if self._at < 0:
                self._meet(optimizer)
            elif optimizer is self._optimizer:
                self._close_step()
            elif any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} and {type(optimizer).__name__} both step parts of the model; "
                    "expected one optimizer"
                )
        except ConfigurationError as error:
            self._refuse(error)

    # ------------------------------------------------------------------------------------------------ its parts

    def _meet(self, optimizer: Optimizer) -> None:
        """Finds the model and its chain at the end of the first step, and starts to measure them."""
        found = model_of(optimizer) if self.root is None else self.root
        parallel = isinstance(found, nn.parallel.DistributedDataParallel | nn.DataParallel)
        root: nn.Module = found.get_submodule("module") if parallel else found
        self._optimizer = optimizer
        chain = find_chain(root, self.path)
        check_model(root, optimizer)
        self.root, self.chain, self._trains = root, chain, root.training
        self._modules = {id(m) for m in found.modules()}
        self._parameters = {id(p) for p in root.parameters()}
        device = next(p.device for block in chain.blocks for p in (*block.parameters(), *root.parameters()))
        self.clock = LayerClock(device)
        self._bytes = PassBytes(len(chain.blocks), gauge_of(root, device))
        self._timer = LayerTimer(chain.blocks, self.clock, path=chain.path, refuse=self._refuse)
        self._state = StateBytes()
        self._real_backward = torch.autograd.backward
        self._patch = self._backward
        torch.autograd.backward = self._patch
        self._at = 0
        total = len(self._purposes)
        self._say(f"{len(chain.blocks)} blocks of {chain.kind} in {chain.path or 'the model'}; {total} steps to come")
        self._open_step()

    @property
    def _purpose(self) -> str:
        return self._purposes[self._at]

    def _open_step(self) -> None:
        (self._timer.detach if self._purpose == WHOLE else self._timer.attach)()
        self._marks = []
        self._period_began = time.perf_counter()
        self._await()

    def _await(self) -> None:
        """Arms the hook by which the next call of one of the model's modules begins a micro-batch."""
        self._awaiting = register_module_forward_pre_hook(self._begin)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert self.root is not None
        if id(module) not in self._modules or not torch.is_grad_enabled() or self.root.training is not self._trains:
            return
        self._awaiting.remove()
        sizes = [x.shape[0] for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim()]
        self._samples.update(sizes[:1])
        if self._purpose == BYTES and not self._marks:
            self._timer.watch = self._bytes.watch
            self._bytes.begin([*self.root.parameters(), *self.root.buffers()])
        self._began = self.clock.mark()
        self._pass = None if self._purpose == WHOLE else self._timer.begin()

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Replacement of `torch.autograd.backward` that records where backward passes begin and end."""
        if self._in_backward:  # checkpointing may call it from within
            self._real_backward(tensors, *args, **kwargs)
            return
        timed, self._pass, began, self._began = self._pass, None, self._began, None
        try:
            self._turn(timed, began, [x for x in tree_leaves(tensors) if isinstance(x, Tensor)])
        except UnsupportedError as error:
            self._refuse(error)
        self._in_backward = True
        try:
            self._real_backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        if not self._over:
            self._close_pass(timed, began)

    def _turn(self, timed: TimedPass | None, began: Any, roots: Sequence[Tensor]) -> None:
        """Records that the forward pass has ended and the backward pass begins."""
        if began is None:
            raise UnsupportedError(
                f"a backward pass began without a forward pass of {type(self.root).__name__} before it; expected one "
                "backward pass for each forward pass, so one loss"
            )
        if timed is not None:
            timed.forward_ends()
            if self._timer.watch is not None:
                self._bytes.forward_ends()
                self._bytes.look(roots)
            timed.backward_begins()

    def _close_pass(self, timed: TimedPass | None, began: Any) -> None:
        if timed is not None:
            timed.ends()
        self._bytes.ends()
        self._timer.watch = None
        self._marks.append((began, self.clock.mark()))
        self._await()

    def _close_step(self) -> None:
        if not self._marks:
            return  # a step without a backward pass
        seconds, end = self.clock.seconds, self.clock.mark()
        optimizer_s = seconds(self._marks[-1][1], end)
        self._timer.settle()
        if self._purpose == WHOLE:
            self._whole.append((len(self._marks), optimizer_s + sum(seconds(a, b) for a, b in self._marks)))
            self._periods.append(time.perf_counter() - self._period_began)
        elif self._purpose == LAYERS:
            self._optimizer_s.append(optimizer_s)
        else:
            self._timer.drop()
        if self._purpose == BYTES:
            self._count_state()
        self._awaiting.remove()
        self._at += 1
        if self.done_steps and self.done_steps % max(1, self.steps // 4) == 0:
            self._say(f"{self.done_steps} of {self.steps} steps")
        if self._at == len(self._purposes):
            self.detach()
            self._report(self.profile())
            return
        self._open_step()

    def _count_state(self) -> None:
        assert self.root is not None
        assert self._optimizer is not None
        rows = state_rows(self.root, self.chain.blocks, self._bytes.used, self._optimizer)
        self._state = StateBytes.of(rows, len(self.chain.blocks), self._timer.name_of)

    def _refuse(self, error: ConfigurationError) -> None:
        if not self._over:
            self.detach()
            self._report(error)

    # ------------------------------------------------------------------------------------------------ its answer

    def profile(self) -> ModelProfile:
        """Returns the measured profile, once all steps are done."""
        of_number = Counter(number for number, _ in self._whole)
        micro_batches = of_number.most_common(1)[0][0]
        device, accelerator = self.clock.device, self.clock.device.type != "cpu"
        return ModelProfile(
            chain=self.chain.path, kind=self.chain.kind, layers=tuple(self._layers()), micro_batches=micro_batches,
            samples=self._samples.most_common(1)[0][0] if self._samples else 1, tied_nbytes=self._state.tied,
            step_s=statistics.median(s for number, s in self._whole if number == micro_batches),
            period_s=statistics.median(self._periods), device=device.type,
            devices=torch.accelerator.device_count() if accelerator else 1,
            memory_nbytes=torch.accelerator.get_memory_info(device)[1] if accelerator else available_nbytes(),
            notes=tuple(self._notes()),
        )  # fmt: skip

    def _layers(self) -> Iterator[Layer]:
        times, state, optimizer_s = self._timer.medians(), self._state, statistics.median(self._optimizer_s)
        trained = sum(state.trained.values())
        for i in range(len(self.chain.blocks)):
            forward, backward = (max(LEAST_S, x) for x in times[i])
            yield Layer(
                name=self._timer.name_of(i), forward_s=forward, backward_s=backward,
                parameter_nbytes=state.parameters[i], gradient_nbytes=state.gradients[i],
                optimizer_nbytes=state.optimizer[i], activation_nbytes=self._bytes.kept[i],
                workspace_nbytes=self._bytes.workspace[i], output_nbytes=self._bytes.entered[i + 1],
                optimizer_s=optimizer_s * state.trained[i] / trained if trained else 0.0,
            )  # fmt: skip

    def _notes(self) -> list[str]:
        name_of, notes = self._timer.name_of, self._state.notes
        found = [*notes[:MOST_LISTED], *([f"and {len(notes) - MOST_LISTED} more"] if len(notes) > MOST_LISTED else [])]
        if self._bytes.skips:
            blocks = ", ".join(map(name_of, sorted(self._bytes.skips)))
            found.append(f"{blocks} get something of earlier layers beside their input: a pipeline refuses to cut that")
        if not self._bytes.measures_workspace:
            found.append("workspace is not measured where blocks are compiled on a CPU, and counts as 0")
        low, middle, high = statistics.quantiles((s for _, s in self._whole), n=4, method="inclusive")
        if high - low > MOST_SPREAD * middle:
            found.append(
                f"half of the steps differ by {(high - low) / middle:.0%}: measure while nothing else runs here"
            )
        return found


_attached: list[ModelProfiler] = []


def _tell(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for profiler in list(_attached):
        profiler.stepped(optimizer)


@cache
def _listen() -> None:
    """Registers the process-wide hook of optimizer steps, once, since it cannot be removed within a step."""
    _tell.only_looks = True  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(_tell)
