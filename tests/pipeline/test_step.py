"""Tests pipeline steps over real links: units, all-reduce by part, dropped attempts, and the average in `.grad`."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from executor_support import one_process, plan_of
from pipeline_models import GPT, step_of, tokens
from step_nodes import Ending, StepJob, layers_of, owners_of, sequential
from test_executor_on_chain import TakesTurns
from torch import nn

from chaos_lightning.collectives.norms import whole_norm
from chaos_lightning.errors import AttemptOverError, ConfigurationError
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.chain import LayerChain
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.parts import find_parts
from chaos_lightning.pipeline.speed import LEAST
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.plan import Detour, Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.schedules import read_instruction
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage_error
from chaos_lightning.protocol.types import ViewId

WIDTH, ROWS = 96, 6
A, B, C, D = NAMES = ("a~1", "b~2", "c~3", "d~4")
BOUND = 1e-13


def a_loss(x, batch):
    return F.mse_loss(x, batch[1])


def a_net(norm=False, tied=False):
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity(), nn.Tanh())

    net = nn.Sequential(*[block() for _ in range(4)])
    if tied:
        net[3][0].weight = net[0][0].weight
    return net.double()


def batches_of(count=5):
    torch.manual_seed(1)
    return [
        (torch.randn(ROWS + j % 2, WIDTH).double(), torch.randn(ROWS + j % 2, WIDTH).double()) for j in range(count)
    ]


def weights_of(batches):
    return [float(len(b[0])) for b in batches]


def pipelines(cuts, micro_batches, names=NAMES, **more):
    """Returns pipelines of these members in order; each cut lists the stage borders of a pipeline."""
    text = ViewPipelines.of(plan_of(cuts, micro_batches, **more)).to_json()
    for letter, name in zip("abcdefg", names, strict=False):
        text = text.replace(f'"{letter}"', f'"{name}"')
    return ViewPipelines.from_json(text)


def routed(rows, detours, lists):
    view = ViewPipelines(
        PipelinePlan(4, rows, detours), {m: tuple(map(read_instruction, row.split())) for m, row in lists.items()}
    )
    view.check()
    return view


VACANT = routed(
    (
        Pipeline((PlanStage(A, 0, 2), PlanStage("", 2, 4)), 2),
        Pipeline((PlanStage(C, 0, 2), PlanStage(D, 2, 4)), 3),
    ),
    tuple(Detour(j, 2, 4, D) for j in range(2)),
    {A: "0F0 0F1 0B0 0B1", C: "0F2 0F3 0B2 0F4 0B3 0B4", D: "1F2 1B2 1F0 1B0 1F3 1B3 1F1 1B1 1F4 1B4"},
)
"""DP 2 x PP 2 after b is lost: d runs the last layers of all micro-batches."""
SHAPES = {
    "DP 1 x PP 2": (NAMES[:2], lambda: pipelines([(0, 2, 4)], [5])),
    "DP 1 x PP 3": (NAMES[:3], lambda: pipelines([(0, 1, 2, 4)], [5])),
    "DP 2 x PP 2": (NAMES, lambda: pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])),
    "other cuts": (NAMES, lambda: pipelines([(0, 1, 4), (0, 3, 4)], [2, 3])),
    "DP 3, one of them whole": (NAMES, lambda: pipelines([(0, 4), (0, 2, 4), (0, 4)], [1, 2, 2])),
    "a vacant place": ((A, C, D), lambda: VACANT),
}


def averages(job):
    """Returns the averaged gradients by name; checks that all owners have equal bits."""
    found = {}
    for m in job.members:
        for name, p in m.net.named_parameters():
            if is_absent(p):
                assert p.grad is None, (m.name, name)
            elif p.grad is not None:
                assert name not in found or torch.equal(found[name], p.grad), (m.name, name)
                found[name] = p.grad.clone()
    return found


def check(got, expected, total, bound=BOUND):
    assert set(got) == {name for name, g in expected.items() if g is not None}
    for name, value in got.items():
        wanted = expected[name] / total
        assert float((value - wanted).abs().max()) <= bound * max(1.0, float(wanted.abs().max())), name


@pytest.fixture
def jobs():
    made = []

    def make(*args, **kwargs):
        made.append(StepJob(*args, **kwargs))
        return made[-1]

    yield make
    for job in made:
        job.close()


def begun(jobs, net, names, view, number=1):
    job = jobs(net, names, sequential(a_loss))
    the_view = job.view(number, view)
    for m in job.members:
        m.own(view)
    return job, the_view


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_average_is_that_of_one_process(jobs, shape, tied):
    names, make = SHAPES[shape]
    net, batches, view = a_net(tied=tied), batches_of(), make()
    weights = weights_of(batches)
    job, the_view = begun(jobs, net, names, view)
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches, weights)
    assert coverage_error(4, [(0, 5)], {m: c.coverage for m, c in given.items()}) == ""
    assert all(c.micro_batches == ((0, 5),) for c in given.values())
    assert sum(c.weight for c in given.values()) == sum(weights)
    expected, _ = one_process(net, a_loss, batches, weights, range(5))
    owners = owners_of(job.parts, view, names)
    parts = job.members[0].accumulation.layout.parts(0)
    assert {m: set(c.norms) for m, c in given.items()} == {m: {p for p in parts if m in owners[p]} for m in names}
    header = job.commit(1, given)
    check(averages(job), expected, sum(weights))
    norm = whole_norm((given[owners[p][0]].norms[p] for p in parts), header.total_weight)
    wanted = sum(float((g / sum(weights)).square().sum()) for g in expected.values())
    assert norm.finite
    assert math.isclose(norm.squared, wanted, rel_tol=1e-12)


def test_members_have_memory_for_what_they_own_alone(jobs):
    net, view = a_net(), pipelines([(0, 2, 4)], [5])
    job, the_view = begun(jobs, net, NAMES[:3], view)  # the third stands by
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches_of(), [1.0] * 5)
    sizes = [m.accumulation.memory.nbytes for m in job.members]
    assert sizes[2] == 0
    assert sum(sizes) == job.members[0].accumulation.layout.nbytes
    assert given[C].coverage == ()
    assert given[C].weight == 0.0
    assert given[C].norms == {}
    assert len({m.accumulation.layout.hash for m in job.members}) == 1


@pytest.mark.parametrize(
    ("shape", "look"),
    [("DP 1 x PP 2", 2), ("DP 1 x PP 2", 8), ("DP 1 x PP 2", 11), *[("DP 2 x PP 2", look) for look in (2, 4, 6, 7)]],
)
def test_a_step_that_runs_again_has_equal_bits(jobs, shape, look):
    """An attempt ended at any point of a step is undone: the next one gives equal bits, and buffers count each
    micro-batch once.
    """
    names, make = SHAPES[shape]
    net, batches, view = a_net(norm=True, tied=True), batches_of(), make()
    weights = weights_of(batches)
    undisturbed, first = begun(jobs, net, names, view)
    undisturbed.commit(1, undisturbed.run(SlotAttempt(first.id, 1), first, 1, batches, weights))
    job, first = begun(jobs, net, names, view)
    second = job.view(2, view)
    ender = next(m for m in reversed(job.members) if len(view.units(m.name)) + 1 >= look)
    ending = Ending(job, ender, look, first.id)
    ended = job.run(SlotAttempt(first.id, 1), first, 1, batches, weights)
    ending.done()
    assert isinstance(ended[ender.name], AttemptOverError)
    for m in job.members:
        m.step.drop()
        assert all(p.grad is None for p in m.net.parameters())
    job.commit(1, job.run(SlotAttempt(second.id, 1), second, 1, batches, weights))
    expected, got = averages(undisturbed), averages(job)
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    for m, other in zip(job.members, undisturbed.members, strict=True):
        for (name, b), (_, o) in zip(m.net.named_buffers(), other.net.named_buffers(), strict=True):
            assert is_absent(b) or torch.equal(b, o), (m.name, name)


def test_an_attempt_that_ends_while_gradients_are_reduced_is_dropped(jobs):
    """A member that has run all its units and waits for another owner's sums is freed from the wait when the attempt
    ends, and its work is undone.
    """
    net, batches, view = a_net(norm=True), batches_of(), pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])
    job, first = begun(jobs, net, NAMES, view)
    second = job.view(2, view)
    last, held = job.members[3], job.members[1]
    before = [b.clone() for b in last.net.buffers()]
    waiting, await_reduced = [], last.step._await_reduced
    last.step._await_reduced = lambda: (waiting.append(1), await_reduced())
    ending = Ending(job, held, 2, first.id, lambda: waiting)
    ended = job.run(SlotAttempt(first.id, 1), first, 1, batches, weights_of(batches))
    ending.done()
    assert isinstance(ended[D], AttemptOverError)
    assert all(p.grad is None for p in last.net.parameters())
    assert all(is_absent(b) or torch.equal(a, b) for a, b in zip(before, last.net.buffers(), strict=True))
    for m in job.members:
        m.step.drop()
    given = job.run(SlotAttempt(second.id, 1), second, 1, batches, weights_of(batches))
    job.commit(1, given)
    expected, _ = one_process(net, a_loss, batches, weights_of(batches), range(5))
    check(averages(job), expected, sum(weights_of(batches)))


def test_the_others_run_the_step_again_after_a_death(jobs):
    """After a death the others run the step again on other routes, and get the same average up to rounding."""
    net, batches, view = a_net(tied=True), batches_of(), pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])
    weights = weights_of(batches)
    job, first = begun(jobs, net, NAMES, view)
    ending = Ending(job, job.members[3], 5, first.id)
    job.run(SlotAttempt(first.id, 1), first, 1, batches, weights)
    ending.done()
    left = [m for m in job.members if m.name != B]
    job.members[1].close()
    job.members = left
    second = job.view(2, VACANT, left)
    for m in left:
        m.step.drop()
    given = job.run(SlotAttempt(second.id, 1), second, 1, batches, weights)
    assert coverage_error(4, [(0, 5)], {m: c.coverage for m, c in given.items()}) == ""
    job.commit(1, given)
    expected, _ = one_process(net, a_loss, batches, weights, range(5))
    check(averages(job), expected, sum(weights))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_several_steps_train_as_one_process(jobs, optimizer):
    net, view = a_net(), pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])
    job, the_view = begun(jobs, net, NAMES, view)
    alone = copy.deepcopy(net)
    steppers = [optimizer([p for p in m.net.parameters() if not is_absent(p)], lr=0.05) for m in job.members]
    theirs = optimizer(alone.parameters(), lr=0.05)
    for step in range(1, 5):
        batches = [(x + step, y) for x, y in batches_of()]
        weights = weights_of(batches)
        for m in job.members:
            m.step.remember_base()
        job.commit(step, job.run(SlotAttempt(the_view.id, step), the_view, step, batches, weights))
        theirs.zero_grad()
        for j, batch in enumerate(batches):
            (a_loss(alone(batch[0]), batch) * weights[j] / sum(weights)).backward()
        for one in (*steppers, theirs):
            one.step()
        mine = {n: p for m in job.members for n, p in m.net.named_parameters() if not is_absent(p)}
        for name, p in alone.named_parameters():
            assert float((mine[name] - p).detach().abs().max()) <= 1e-11, (step, name)
        for m in job.members:
            for name, p in m.net.named_parameters():
                assert is_absent(p) or torch.equal(p, mine[name]), (m.name, name)


def test_buffers_are_averaged_over_micro_batches(jobs):
    """The buffers of owners that ran 2 and 3 micro-batches become their weighted mean, at all owners and
    nowhere else.
    """
    net, batches, view = a_net(norm=True), batches_of(), pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])
    job, the_view = begun(jobs, net, NAMES, view)
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches, weights_of(batches))
    seen = {m.name: {n: b.clone() for n, b in m.net.named_buffers()} for m in job.members}
    job.commit(1, given)
    for pair, layers in (((A, C), (0, 1)), ((B, D), (2, 3))):
        for layer in layers:
            for name in ("running_mean", "running_var"):
                key = f"{layer}.1.{name}"
                mean = (2 * seen[pair[0]][key].float() + 3 * seen[pair[1]][key].float()) / 5
                found = [dict(m.net.named_buffers())[key] for m in job.members if m.name in pair]
                assert torch.equal(found[0], found[1])
                torch.testing.assert_close(found[0].float(), mean)
            counters = [dict(m.net.named_buffers())[f"{layer}.1.num_batches_tracked"] for m in job.members]
            assert [int(c) for c in counters if not is_absent(c)] == [3, 3]  # (2 x 2 + 3 x 3) / 5, rounded


def test_empty_micro_batches_and_a_step_of_none(jobs):
    net, batches, view = a_net(norm=True), batches_of(), pipelines([(0, 2, 4), (0, 2, 4)], [2, 3])
    weights = weights_of(batches)
    job, the_view = begun(jobs, net, NAMES, view)
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches, weights, empty=(1, 2, 3, 4))
    assert all(c.micro_batches == ((0, 1),) for c in given.values())
    job.commit(1, given)
    alone, _ = one_process(net, a_loss, batches, weights, [0])
    check(averages(job), alone, weights[0])
    for m in job.members:
        m.step.remember_base()
    before = {m.name: {n: b.clone() for n, b in m.net.named_buffers() if not is_absent(b)} for m in job.members}
    given = job.run(SlotAttempt(the_view.id, 2), the_view, 2, batches, weights, empty=range(5))
    assert all((c.weight, c.coverage, c.micro_batches) == (0.0, (), ()) for c in given.values())
    job.commit(2, given)
    assert averages(job) == {}
    for m in job.members:
        for name, b in before[m.name].items():
            assert torch.equal(dict(m.net.named_buffers())[name], b)


def test_a_gradient_that_a_user_changes_after_it_was_sent_is_refused(jobs):
    net, batches, view = a_net(), batches_of(), pipelines([(0, 4)], [5])
    job, the_view = begun(jobs, net, NAMES[:1], view)
    last = job.members[0].net[0][0].weight
    readiness, done = job.members[0].step._readiness, []

    def scaled(layer):
        if layer == 0 and not done:
            done.append(last.grad.mul_(2.0))

    told = readiness.layer_done
    readiness.layer_done = lambda layer: (scaled(layer), told(layer))
    with pytest.raises(ConfigurationError, match=r"0\.0\.weight.*changed between"):
        job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches, weights_of(batches))


def test_a_models_tied_embedding_is_reduced_over_the_owners_of_all_layers_that_use_it(jobs):
    """The tied embedding of a GPT, which the first and the last layers use, is reduced over the owners of all these
    layers.
    """
    torch.manual_seed(0)
    net = GPT(4, tied=True).double()
    chain = LayerChain(net, "blocks", step_of(net))
    batches = [tokens(rows=2 + j % 2) for j in range(4)]
    parts = find_parts(chain, batches[0])
    chain.close()
    view = pipelines([(0, 2, 4), (0, 1, 4)], [2, 2])
    weights = weights_of(batches)
    job = jobs(net, NAMES, lambda root: TakesTurns(LayerChain(root, "blocks", step_of(root))), parts)
    the_view = job.view(1, view)
    for m in job.members:
        m.own(view)
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches, weights)
    shared = [part for part in parts.users if part.startswith("shared.")]
    assert [owners_of(parts, view, NAMES)[part] for part in shared] == [list(NAMES)]
    assert all(shared[0] in c.norms for c in given.values())
    job.commit(1, given)
    step = step_of(alone := copy.deepcopy(net))
    for batch, weight in zip(batches, weights, strict=True):
        (step(batch) * weight).backward()
    check(averages(job), {n: p.grad for n, p in alone.named_parameters()}, sum(weights))


def test_a_part_moves_between_steps(jobs):
    """Between two steps layer 1 moves from a to b, which has pulled it; both steps give the right averages."""
    net, batches = a_net(norm=True), batches_of()
    weights = weights_of(batches)
    before, after = pipelines([(0, 2, 4)], [5]), pipelines([(0, 1, 4)], [5])
    job, first = begun(jobs, net, NAMES[:2], before)
    job.commit(1, job.run(SlotAttempt(first.id, 1), first, 1, batches, weights))
    first_average = averages(job)
    one, other = job.members
    names = [n for n, part in job.parts.part_of.items() if part == "layer.1"]
    other.model_memory.room(names)
    with torch.no_grad():
        for name in names:
            source = {**dict(one.net.named_parameters()), **dict(one.net.named_buffers())}[name]
            {**dict(other.net.named_parameters()), **dict(other.net.named_buffers())}[name].copy_(source)
    second = job.view(2, after)
    for m in job.members:
        m.own(after)
    given = job.run(SlotAttempt(second.id, 2), second, 2, batches, weights)
    assert set(given[A].norms) == {"layer.0"}
    job.commit(2, given)
    check(averages(job), {n: g * sum(weights) for n, g in first_average.items()}, sum(weights))
    assert layers_of(after, B) == [1, 2, 3]


def test_a_step_is_told_of_the_view_by_whose_plan_it_runs(jobs):
    net, batches = a_net(), batches_of()
    job, first = begun(jobs, net, NAMES[:2], pipelines([(0, 2, 4)], [5]))
    layers = tuple(Layer(name=f"l{i}", forward_s=0.1, backward_s=0.2) for i in range(4))
    foreseen = TrainingJob(layers=layers, devices=(Device(name="d", memory_nbytes=1),), micro_batches=5)
    for m in job.members:
        m.step.foresee(foreseen)
    for number in range(1, LEAST + 2):
        job.commit(number, job.run(SlotAttempt(first.id, number), first, number, batches, weights_of(batches)))
        told = [m.step.step_time(first.id) for m in job.members]
        assert all(0.0 < between_s < step_s for step_s, between_s in told) is (number > LEAST), told
    second = job.view(2, pipelines([(0, 2, 4)], [5]))
    assert [m.step.step_time(second.id) for m in job.members] == [(0.0, 0.0)] * 2, "nothing has run in it"
    for m in job.members:
        m.step.open(SlotAttempt(second.id, 9), job.pipelines[second.id], m.name)
        assert m.step.step_time(second.id).step_s > 0.0, "the plan is as before"
        assert m.step.step_time(first.id) == (0.0, 0.0)
        m.step.open(SlotAttempt(second.id, 9), pipelines([(0, 1, 4)], [5]), m.name)
        assert m.step.step_time(second.id) == (0.0, 0.0)


def test_a_member_that_joins_again_waits_for_attempts_of_any_view(jobs):
    """A member that joins again forgets which attempts have ended, since its record is of the chain before."""
    view = pipelines([(0, 2, 4)], [5])
    job, the_view = begun(jobs, a_net(), NAMES[:2], view)
    for m in job.members:
        m.step.end(ViewId(9, 9))
        m.step.restart()
    given = job.run(SlotAttempt(the_view.id, 1), the_view, 1, batches_of(), [1.0] * 5)
    assert sum(c.weight for c in given.values()) == 5.0
