"""Baseline for all policies: data-parallel training, where every inner step waits for all clusters' gradients."""

from __future__ import annotations

from benchmarks.outer_convergence.curves import Point
from benchmarks.outer_convergence.job import CLUSTERS, TRANSFER, Weather, speeds
from benchmarks.outer_convergence.learners import Learner, Samples, Task
from chaos_lightning.outer.rules.types import Covered


def data_parallel(task: Task, eta: int, seed: int, total: int, inner_steps: int) -> list[Point]:
    """Trains with one optimizer for all clusters; a step takes as long as that of the slowest cluster plus two
    transfers on the far link.

    A leg of jitter and straggling has as many steps as a round. The learning rate grows with the root of the batch, as
    is usual for AdamW.

    Returns:
        The validation loss after each so many samples as a round has.
    """
    samples, weather = Samples(task, seed), Weather(seed)
    learner = Learner(samples, seed, rate=CLUSTERS**0.5)
    batch, now_s = CLUSTERS * task.batch, 0.0
    curve = [Point(0.0, 0, learner.loss(samples.tests))]
    for step in range(total // batch):
        start = step * batch % (samples.length - batch)
        learner.step(samples.take([Covered(0, ((start, start + batch),))]))
        leg = step // inner_steps
        now_s += max(speed * weather.factor(number, leg) for number, speed in enumerate(speeds(eta)))
        now_s += 2 * TRANSFER * inner_steps
        if (step + 1) % inner_steps == 0:
            curve.append(Point(now_s, (step + 1) * batch, learner.loss(samples.tests)))
    return curve
