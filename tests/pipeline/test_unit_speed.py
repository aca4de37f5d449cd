"""Tests a member's speed relative to its forecast: taken from the device's computing time in any layers,
without waits.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from executor_support import MemoryExchange, Post, SequentialLayers, plan_of
from torch import nn

from chaos_lightning.pipeline.executor import PipelineExecutor, SlotAttempt, StepWork, UnitTime
from chaos_lightning.pipeline.layer_times import LayerClock
from chaos_lightning.pipeline.speed import IDLE_STEPS, LEAST, WINDOW, UnitSpeed
from chaos_lightning.pipeline.tensors import Border
from chaos_lightning.planning.pipelines.job import Device, Layer, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.units import BACKWARD, FORWARD, StepUnit, ViewPipelines
from chaos_lightning.protocol.types import MOST_SPEED, ViewId

CLOCK = LayerClock(torch.device("cpu"))


def job(speed: float = 1.0, unit_s: float = 0.0) -> TrainingJob:
    layers = tuple(Layer(name=f"l{i}", forward_s=1.0 + i, backward_s=2.0 * (1 + i)) for i in range(4))
    device = Device(name="d", memory_nbytes=1, speed=speed)
    return TrainingJob(layers=layers, devices=(device,), micro_batches=2, overheads=Overheads(unit_s=unit_s))


def ran(first: int, end: int, slower: float = 1.0) -> list[UnitTime]:
    """Returns the timed units of a step through these layers, `slower` times as long as forecast."""
    work_s = sum(1.0 + i for i in range(first, end))
    found, now = [], 0.0
    for kind, seconds in ((FORWARD, work_s), (BACKWARD, 2 * work_s)):
        found.append(UnitTime(StepUnit(kind, 0, first, end, "", ""), now, now + seconds * slower))
        now += 1000.0  # in which it waits
    return found


def test_a_speed_is_told_after_some_steps_and_is_the_median_of_the_latest() -> None:
    speed = UnitSpeed(job(), CLOCK)
    for number in range(LEAST):
        assert speed.told == 0.0, number
        speed.add(ran(0, 2))
    assert speed.told == 1.0
    speed.add(ran(0, 2, slower=50.0))
    assert speed.told == 1.0, "one step that is out of line changes nothing"
    for _ in range(WINDOW):
        speed.add(ran(0, 2, slower=2.5))
    assert speed.told == pytest.approx(0.4)


def test_a_speed_does_not_depend_on_which_layers_a_member_has() -> None:
    speed = UnitSpeed(job(), CLOCK)
    for first, end in ((0, 1), (2, 4), (0, 4)) * 3:
        speed.add(ran(first, end, slower=2.0))
    assert speed.told == pytest.approx(0.5)


def test_the_devices_speed_is_foreseen_and_what_a_unit_takes_beside_its_layers_is_no_computing() -> None:
    fast, costly = UnitSpeed(job(speed=2.0), CLOCK), UnitSpeed(job(unit_s=1.0), CLOCK)
    for _ in range(LEAST):
        fast.add(ran(0, 4))
        costly.add(ran(0, 1))
    assert (fast.told, costly.told) == (pytest.approx(0.5), 1.0)


@pytest.mark.parametrize(("slower", "told"), [(1e9, 1 / MOST_SPEED), (1e-9, MOST_SPEED)])
def test_what_cannot_be_is_never_told(slower: float, told: float) -> None:
    speed = UnitSpeed(job(), CLOCK)
    for _ in range(LEAST):
        speed.add(ran(0, 4, slower))
    assert speed.told == told


def test_a_member_that_runs_nothing_keeps_its_speed_for_a_while_and_forgets_it() -> None:
    speed = UnitSpeed(job(), CLOCK)
    for _ in range(LEAST):
        speed.add(ran(0, 4, slower=4.0))
    for _ in range(IDLE_STEPS - 1):
        speed.add([])
    assert speed.told == 0.25
    speed.add([])
    assert speed.told == 0.0
    for _ in range(LEAST):
        speed.add(ran(0, 4))
    assert speed.told == 1.0


def test_a_step_lasts_from_its_first_unit_to_that_of_the_next_and_is_of_the_plan_in_force() -> None:
    speed, now = UnitSpeed(job(), CLOCK), 0.0
    plans = plan_of([(0, 2, 4)], [2]), plan_of([(0, 3, 4)], [2])

    def steps(number: int, between_s: float) -> None:
        nonlocal now
        for _ in range(number):
            now += between_s
            speed.add([t._replace(began=t.began + now, ended=t.ended + now) for t in ran(0, 2)])
            now += 1006.0  # until the last unit has ended

    speed.follow(plans[0])
    steps(LEAST, 5.0)
    assert speed.step_time == (0.0, 0.0), "so many steps have one period less"
    steps(1, 5.0)
    assert speed.step_time == (1011.0, 5.0)
    steps(1, 50.0)
    assert speed.step_time == (1011.0, 5.0), "one step that is out of line changes nothing"
    speed.follow(plan_of([(0, 2, 4)], [2]))
    assert speed.step_time == (1011.0, 5.0), "an equal plan"
    speed.follow(plans[1])
    assert speed.step_time == (0.0, 0.0)
    steps(1, 100.0)  # from the plan before
    steps(LEAST, 4.0)
    assert speed.step_time == (1010.0, 4.0)
    speed.add([])
    steps(WINDOW, 3.0)
    assert speed.step_time == (1009.0, 3.0), "a step without units has no period, nor has the one after it"


class Sleeping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x * 2


class LateExchange(MemoryExchange):
    """Exchange that delays border tensors by 0.3 s both when sending and when taking them."""

    def take(self, attempt: SlotAttempt, key: object) -> Border:
        time.sleep(0.3)
        return super().take(attempt, key)  # type: ignore[no-untyped-call,no-any-return]

    def send(self, attempt: SlotAttempt, to: str, key: object, border: Border) -> None:
        time.sleep(0.3)
        super().send(attempt, to, key, border)  # type: ignore[no-untyped-call]


def test_waits_for_tensors_and_batches_are_not_computing() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Sleeping())
    view = ViewPipelines.of(plan_of([(0, 1, 2)], [1]))
    attempt, took = SlotAttempt(ViewId(1, 1), 1), dict[str, list[float]]()

    def batch(j: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.3)
        return torch.ones(2, 3), torch.ones(2, 3)

    def run(name: str, exchange: MemoryExchange) -> None:
        layers = SequentialLayers(net, lambda x, batch: (x - batch[1]).square().mean())
        executor = PipelineExecutor(net, layers, exchange)
        executor.remember_base()
        sums = executor.run(StepWork(attempt, 1, view.units(name), batch, lambda j: 1.0))
        took[name] = [CLOCK.seconds(t.began, t.ended) for t in sums.times]

    for exchange in (MemoryExchange, LateExchange):  # what torch does once, it does the first time
        post = Post()
        threads = [threading.Thread(target=run, args=(name, exchange(post, name))) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert all(seconds < 0.2 for seconds in (*took["a"], *took["b"]))
    assert took["b"][0] >= 0.02
