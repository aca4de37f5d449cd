"""Tests the units of a step: their order, neighbours and coverage, and the view's text from which they follow."""

import json
import random

import pytest
from pipeline_jobs import at, equal_job, equal_plan, lists_of, plan_of, random_job

from chaos_lightning.errors import PlanError
from chaos_lightning.planning.pipelines.rerouting import FatalLossError, reroute
from chaos_lightning.planning.pipelines.units import (
    BACKWARD,
    FORWARD,
    BorderKey,
    StepUnit,
    ViewPipelines,
    closing,
    coverage,
    coverage_error,
)
from chaos_lightning.protocol.types import LayersCovered


def members(view):
    return sorted(view.plan.stages)


def run_all(view, empty=()):
    """Runs the units of all members, each after its inputs; returns (member, unit) in the order in which they ran."""
    rows = {m: list(view.units(m, empty)) for m in members(view)}
    sent, ran = {}, []
    while any(rows.values()):
        before = len(ran)
        for m, row in rows.items():
            while row and (row[0].taken is None or sent.get(row[0].taken) == (row[0].source, m)):
                u = row.pop(0)
                ran.append((m, u))
                if u.sent:
                    assert u.sent not in sent
                    sent[u.sent] = (m, u.to)
        assert len(ran) > before, "members wait for each other for ever"
    return ran


def whole(view, empty=()):
    """Checks that every layer of every micro-batch runs forward and backward exactly once, in order, at an owner of the
    layer; returns the run.
    """
    ran = run_all(view, empty)
    for j in range(view.plan.micro_batches):
        forward = [(u.first, u.end) for _, u in ran if u.micro_batch == j and u.kind == FORWARD]
        backward = [(u.first, u.end) for _, u in ran if u.micro_batch == j and u.kind == BACKWARD]
        assert forward == backward[::-1]
        reached = [layer for first, end in forward for layer in range(first, end)]
        assert reached == ([] if j in empty else list(range(view.plan.layer_count)))
    holders = view.plan.holders()
    assert all(m in holders[layer] for m, u in ran for layer in range(u.first, u.end))
    given = {m: coverage(view.units(m, empty)) for m in members(view)}
    due = [(j, j + 1) for j in range(view.plan.micro_batches) if j not in empty]
    assert coverage_error(view.plan.layer_count, due, given) == ""
    return ran


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 5), (3, 2), (4, 1), (1, 3)])
def test_1f1b_runs_everything_once(stages, micro_batches):
    job = equal_job(2, stages, micro_batches)
    view = ViewPipelines.of(equal_plan(job, 2))
    whole(view)
    last = view.units(at(0, stages - 1))
    assert [u.kind for u in last] == [FORWARD, BACKWARD] * micro_batches
    assert all(u.to == "" for u in last if u.kind == FORWARD)


def test_a_unit_names_its_neighbours_and_keys():
    view = ViewPipelines.of(equal_plan(equal_job(1, 3, 2), 1))
    first, *_ = view.units(at(0, 0))
    assert first == StepUnit(FORWARD, 0, 0, 1, "", at(0, 1))
    assert (first.taken, first.sent) == (None, BorderKey(FORWARD, 0, 1))
    back = next(u for u in view.units(at(0, 1)) if u.kind == BACKWARD)
    assert back == StepUnit(BACKWARD, 0, 1, 2, at(0, 2), at(0, 0))
    assert (back.taken, back.sent) == (BorderKey(BACKWARD, 0, 2), BorderKey(BACKWARD, 0, 1))
    assert str(back) == "the backward pass of micro-batch 0 through layers 1 to 1"


def test_pipelines_of_different_cuts_and_lengths():
    job = equal_job(3, 4, 2)
    view = ViewPipelines.of(plan_of(job, [(0, 1, 4), (0, 2, 3, 4), (0, 4)], [1, 3, 2]))
    whole(view)
    assert view.lists == {}


def test_an_empty_micro_batch_has_no_units():
    view = ViewPipelines.of(equal_plan(equal_job(2, 3, 3), 2))
    whole(view, empty={1, 5})
    assert all(u.micro_batch not in (1, 5) for m in members(view) for u in view.units(m, {1, 5}))
    assert run_all(view, empty=set(range(6))) == []


def test_a_detour_runs_at_a_peer_by_lists_of_the_text():
    job = equal_job(2, 3, 3)
    plan = reroute(job, equal_plan(job, 2), [at(0, 1)])
    view = ViewPipelines.of(plan, lists_of(job, plan))
    ran = whole(view)
    assert {u.micro_batch for m, u in ran if m == at(1, 1)} == set(range(6))
    again = ViewPipelines.from_json(view.to_json())
    assert again == view
    assert again.to_json() == view.to_json()
    assert [again.units(m) for m in members(again)] == [view.units(m) for m in members(view)]


def test_random_plans_after_losses_run_everything_once():
    chance = random.Random(5)
    ran = 0
    for _ in range(60):
        job, plan = random_job(chance)
        try:
            plan = reroute(job, plan, chance.sample(sorted(plan.stages), 1), search=False)
        except FatalLossError:
            continue
        view = ViewPipelines.of(plan, lists_of(job, plan, caps=(0,)))
        whole(view, empty={chance.randrange(plan.micro_batches)})
        assert ViewPipelines.from_json(view.to_json()) == view
        ran += 1
    assert ran > 10


def test_one_who_stands_by_has_no_units():
    job = equal_job(2, 2, 2)
    view = ViewPipelines.of(plan_of(job, [(0, 1, 2)], [4]))
    assert view.units("p1s0") == view.units("nobody") == ()


# ------------------------------------------------------------------------------------------------ the text


def rerouted():
    job = equal_job(2, 2, 2)
    plan = reroute(job, equal_plan(job, 2), [at(0, 1)])
    return ViewPipelines.of(plan, lists_of(job, plan))


def test_the_text_is_canonical_and_short():
    view = ViewPipelines.of(equal_plan(equal_job(1, 2, 2), 1))
    assert view.to_json() == (
        '{"plan":{"layers":2,"pipelines":[{"micro_batches":2,"stages":[["p0s0",0,1],["p0s1",1,2]]}]}}'
    )
    assert json.loads(rerouted().to_json())["lists"]["p1s1"].startswith("1F")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.pop("plan"), "expected an object with `plan`"),
        (lambda about: about.update(more=1), "expected an object with `plan`"),
        (lambda about: about.update(lists=[1]), "`lists` is no object of texts"),
        (lambda about: about["lists"].update(p0s0=3), "`lists` is no object of texts"),
        (lambda about: about["lists"].update(p0s0="0F0 nonsense"), "'nonsense' is no instruction"),
        (lambda about: about["lists"].update(p0s0="0F0 0F0"), "0F0 is there twice"),
        (lambda about: about["lists"].pop("p0s0"), "0F0 is missing"),
        (lambda about: about["lists"].update(p0s0="0I0"), "0I0 is half of a backward pass"),
        (lambda about: about["lists"].update(p9s9="0F0"), "'p9s9' has an instruction list"),
        (lambda about: about["lists"].update(p0s1=""), "'p0s1' has an instruction list"),
        (lambda about: about["plan"].update(layers=10**9), "1000000000 layers; expected at most 65536"),
        (lambda about: about["plan"]["pipelines"][0].update(micro_batches=10**9), "micro-batches; expected at most"),
        (lambda about: about["plan"]["pipelines"][0].update(micro_batches="a"), "cannot be read"),
        (lambda about: about["plan"].update(pipelines=3), "cannot be read"),
        (lambda about: about["plan"].update(detours=[]), "nobody runs layers"),
    ],
)
def test_a_wrong_text_is_refused(change, words):
    about = json.loads(rerouted().to_json())
    change(about)
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        ViewPipelines.from_json(json.dumps(about))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", "[" * 100_000, '{"plan":null}', '{"plan":[]}'])
def test_what_is_no_such_text_is_refused(text):
    with pytest.raises(PlanError, match="a view's pipelines cannot be read"):
        ViewPipelines.from_json(text)


def test_lists_that_wait_for_each_other_are_refused():
    about = json.loads(rerouted().to_json())
    row = about["lists"]["p0s0"].split()
    about["lists"]["p0s0"] = " ".join([*(x for x in row if "F" in x), *(x for x in row if "B" in x)][::-1])
    with pytest.raises(PlanError, match="0B"):
        ViewPipelines.from_json(json.dumps(about))


def test_coupled_pipelines_need_their_lists():
    with pytest.raises(PlanError, match="is missing"):
        ViewPipelines.of(rerouted().plan)


# ------------------------------------------------------------------------------------------------ coverage


def test_coverage_joins_layers_and_micro_batches():
    units = [StepUnit(BACKWARD, j, first, end, "", "") for j, first, end in ((0, 2, 4), (1, 2, 4), (3, 0, 3))]
    units.append(StepUnit(FORWARD, 9, 0, 4, "", ""))
    assert coverage(units) == (
        LayersCovered(0, 2, ((3, 4),)),
        LayersCovered(2, 3, ((0, 2), (3, 4))),
        LayersCovered(3, 4, ((0, 2),)),
    )
    assert coverage([]) == ()
    assert coverage(units, FORWARD) == (LayersCovered(0, 4, ((9, 10),)),)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": [(0, 2, [(0, 2)])]}, ""),
        ({"a": [(0, 2, [(0, 1)])], "b": [(0, 2, [(1, 2)])]}, ""),
        ({"a": [(0, 1, [(0, 2)])]}, "layer 1: micro-batches [0, 2) are in the sum of no member"),
        ({}, "layers 0 to 1: micro-batches [0, 2) are in the sum of no member"),
        (
            {"a": [(0, 2, [(0, 2)])], "b": [(1, 2, [(1, 2)])]},
            "layer 1: micro-batches [1, 2) are in the sums of a and b",
        ),
        ({"a": [(0, 2, [(0, 3)])]}, "layers 0 to 1: a names micro-batches [2, 3), which this step does not have"),
        ({"a": [(0, 3, [(0, 2)])]}, "layer 2: none of this model's 2 layers"),
        ({"a": [(0, 2, [(0, 2), (1, 2)])]}, ""),
        ({"a": [(0, 2, [(0, 2)])] * 6}, "a names 6 runs of layers; expected at most 5 of 2 layers"),
    ],
)
def test_coverage_errors_name_layers_micro_batches_and_members(given, words):
    rows = {m: [LayersCovered(first, end, tuple(spans)) for first, end, spans in found] for m, found in given.items()}
    assert coverage_error(2, [(0, 2)], rows) == words


def test_closing_units():
    view = ViewPipelines.of(plan_of(equal_job(1, 3, 2), [(0, 2, 3)], [2]))
    units = view.units("p0s0")
    assert [u.kind for u in units] == ["F", "F", "B", "B"]
    assert closing(units) == ((), (), (), (1, 0))
    assert closing(()) == ()
