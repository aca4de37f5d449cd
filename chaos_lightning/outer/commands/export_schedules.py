"""Moves the learning-rate schedules of an exported checkpoint to the step of the version that was exported.

Theory of operation. A checkpoint of Lightning has the state of each schedule, and not its class. torch's own schedules
are told apart by the names in their state, so the export makes one of that class, with the learning rates that the
checkpoint's optimizer has, and steps it as often as the job has stepped since. What cannot be moved so (a function of
the user's, a class of another package) is left as it is and named.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from torch.optim import lr_scheduler as torch_schedules

from chaos_lightning.outer.rules.types import JobProgress

_ALL = frozenset({"base_lrs", "last_epoch", "_step_count", "_last_lr", "verbose", "_get_lr_called_within_step",
                  "_is_initial"})  # fmt: skip
_BY_NAMES: dict[frozenset[str], type[torch_schedules.LRScheduler]] = {
    frozenset({"step_size", "gamma"}): torch_schedules.StepLR,
    frozenset({"milestones", "gamma"}): torch_schedules.MultiStepLR,
    frozenset({"gamma"}): torch_schedules.ExponentialLR,
    frozenset({"factor", "total_iters"}): torch_schedules.ConstantLR,
    frozenset({"start_factor", "end_factor", "total_iters"}): torch_schedules.LinearLR,
    frozenset({"power", "total_iters"}): torch_schedules.PolynomialLR,
    frozenset({"T_max", "eta_min"}): torch_schedules.CosineAnnealingLR,
    frozenset({"T_0", "T_i", "T_mult", "eta_min", "T_cur"}): torch_schedules.CosineAnnealingWarmRestarts,
    frozenset({"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum"}): torch_schedules.OneCycleLR,
    frozenset({"total_steps", "_schedule_phases", "_anneal_func_type", "cycle_momentum", "use_beta1"}): (
        torch_schedules.OneCycleLR
    ),
}


def move_schedules(made: dict[str, Any], like: dict[str, Any], progress: JobProgress) -> list[str]:
    """Moves a checkpoint's learning-rate schedules, and the learning rates of its optimizers, to the step of
    `progress`.

    Args:
        made: Checkpoint to change.
        like: Checkpoint from which `made` is made.
        progress: Progress of the job, which gives the step.

    Returns:
        What stays where it was, in sentences.
    """
    states = copy.deepcopy(like.get("lr_schedulers", []))
    optimizers = copy.deepcopy(like.get("optimizer_states", []))
    left = []
    for number, state in enumerate(states):
        if "last_epoch" not in state or "num_bad_epochs" in state:  # goes by a metric
            continue
        due = state["last_epoch"] + _steps(state["last_epoch"], like, progress)
        index = number if len(optimizers) == len(states) else 0
        lone = len(optimizers) in (1, len(states))
        if due == state["last_epoch"]:
            continue
        if frozenset(state) - _ALL == {"lr_lambdas"}:
            state |= {"last_epoch": due, "_step_count": state["_step_count"] + due - state["last_epoch"]}
            left.append(
                f"schedule {number} of the checkpoint is a function of yours: the first step has the checkpoint's "
                f"learning rate, and those after it go by the version's step, {due}"
            )
        elif not (lone and _moved(state, optimizers[index]["param_groups"], due)):
            left.append(
                f"schedule {number} of the checkpoint stays at its step {state['last_epoch']}, and the version is at "
                f"step {due}: it is no class of torch's that can be moved there. Set it when you load the checkpoint"
            )
    made |= {"lr_schedulers": states, "optimizer_states": optimizers} if states else {}
    return left


def _steps(taken: int, like: dict[str, Any], progress: JobProgress) -> int:
    """Returns how many steps a schedule must take from the checkpoint to the version; it steps once an epoch, or every
    few optimizer steps.
    """
    before, epoch = int(like["global_step"]), int(like["epoch"])
    if taken != before and taken in (epoch, epoch + 1):
        return progress.epoch - taken
    frequency = before // (taken + 1) + 1
    return progress.steps // frequency - taken


def _moved(state: dict[str, Any], groups: list[dict[str, Any]], due: int) -> bool:
    """Moves a schedule to the step `due` and sets the parameter groups' learning rates; returns False if that is not
    possible.
    """
    kind = _BY_NAMES.get(frozenset(state) - _ALL)
    if kind is None or due < state["last_epoch"]:
        return False
    schedule = kind.__new__(kind)
    vars(schedule).update(copy.deepcopy(state))
    trial = copy.deepcopy(groups)
    schedule.optimizer = SimpleNamespace(param_groups=trial, step=_stepped)  # type: ignore[assignment]
    try:
        for _ in range(due - state["last_epoch"]):
            schedule.step()
    except ValueError:  # beyond its end
        return False
    state.update({name: value for name, value in vars(schedule).items() if name in state})
    for group, now in zip(groups, trial, strict=True):
        group.update(now)
    return True


def _stepped() -> None:
    """Does nothing: takes the place of the optimizer's `step`, whose call the schedule looks for."""


vars(_stepped)["_wrapped_by_lr_sched"] = True
