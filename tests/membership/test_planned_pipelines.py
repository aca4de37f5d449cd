"""Tests the planner's pipelines in the scheduler: founding, losses, better plans, ends of jobs, and messages to
members.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines_talk import Talk

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.desk import SchedulerPhase
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.membership.pipelining import PipelineChoice
from chaos_lightning.membership.planned import PlannedPipeliner
from chaos_lightning.membership.scheduler import SchedulerMachine, planned
from chaos_lightning.membership.searching import searched
from chaos_lightning.membership.topology import connected, every_pair, pair
from chaos_lightning.planning.pipelines.estimate import estimate
from chaos_lightning.planning.pipelines.files import job_of
from chaos_lightning.planning.pipelines.job import Device, Layer, LinkRate, Overheads, TrainingJob
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.request import PIPELINE_POLICIES, PipelineRequest
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage, coverage_error
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Fence,
    Leave,
    LinkReport,
    Member,
    NextView,
    Notice,
    Refused,
    Saved,
    Settings,
    Span,
    View,
    ViewId,
)

AMPLE = 10_000
"""Room for all layers, and for those that are handed over meanwhile."""
HALF = 20
"""Room for two of four layers."""


def request(memory_nbytes: int = AMPLE, *, layers: int = 4, micro_batches: int = 4, **more: Any) -> PipelineRequest:
    made = tuple(Layer(name=f"block.{i}", forward_s=1.0, backward_s=2.0, parameter_nbytes=10) for i in range(layers))
    device = Device(name="me", memory_nbytes=memory_nbytes)
    job = TrainingJob(layers=made, devices=(device,), micro_batches=micro_batches)
    return PipelineRequest(**{"job": job, "policy": "adaptive", "copies": 2, **more})


def talk_of(*names: str, asks: PipelineRequest | None = None, min_nodes: int = 1) -> Talk:
    text = (asks or request()).to_json()
    return Talk(*names, min_nodes=min_nodes, asks=lambda name: text, pipeliner_for=planned)


def noted(talk: Talk, name: str) -> list[dict[str, Any]]:
    return [note for note in talk.notes if note["name"] == name]


def loses(talk: Talk, name: str) -> None:
    """Kills this member, and lets the others report which parts of the state they hold."""
    before = talk.view
    talk.die(name)
    for other in list(talk.conns):
        talk.reports(other, before, talk.owned(other, before))


# ------------------------------------------------------------------ founding


def test_a_founding_waits_until_a_plan_fits_and_says_what_it_takes() -> None:
    talk = talk_of(asks=request(HALF))
    talk.come("a")
    talk.wait(0.2)
    notice = talk.last("a", Notice)
    assert isinstance(notice, Notice)
    assert "no pipelines fit those that are ready" in notice.text
    assert "a plan needs 2 members" in notice.text
    (event,) = noted(talk, "pipelines")  # once, however often it is looked at
    assert (event["view"], event["least_members"], event["chosen"]) == ("", 2, None)
    talk.come("b")
    decision = talk.last("b", Decide)
    assert isinstance(decision, Decide)
    assert {talk.owned(name, decision.view) for name in "ab"} == {((0, 2), (4, 5)), ((2, 5),)}
    assert noted(talk, "pipelines")[-1]["view"] == str(decision.view.id)
    assert "first plan" in noted(talk, "pipelines")[-1]["reason"]


def test_status_says_who_runs_what() -> None:
    talk = talk_of("a", "b", "c", asks=request(10, layers=2), min_nodes=3)
    facts = talk.machine.snapshot()
    assert facts["pipelines"] == "1 x 2"
    rows = facts["members"]
    assert isinstance(rows, list)
    assert sorted(row["runs"] for row in rows) == ["layer 0", "layer 1", "stands by"]


def test_shared_parameters_are_parts_behind_the_layers() -> None:
    talk = talk_of("a", "b", asks=request(HALF, shared={"wte": (0, 3)}), min_nodes=2)
    assert division(talk.view).names[4:] == ("shared.wte", "rest")
    assert len(division(talk.view).owners[4]) == 2


def test_a_job_without_pipelines_asks_for_none() -> None:
    talk = Talk("a", "b", asks=lambda name: "", pipeliner_for=planned)
    assert talk.view.pipelines == ""
    assert not noted(talk, "pipelines")
    assert not talk.searches
    assert "runs" not in str(talk.machine.snapshot())
    assert talk.machine.pipelining._made is None


# ------------------------------------------------------------------ who is refused


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ("", "pipelines of c is none, the job's (from a) is 4 layers in 4 micro-batches"),
        (request(layers=6).to_json(), "the number of layers of c is 6, the job's (from a) is 4"),
        (request(micro_batches=8).to_json(), "the number of micro-batches of c is 8, the job's (from a) is 4"),
        (request(policy="reroute").to_json(), "policy of c is reroute, the job's (from a) is adaptive"),
        (
            request(shared={"w": (0, 1)}).to_json(),
            "what layers share of c is w by layers 0, 1, the job's (from a) is n",
        ),
        ("nonsense", "c: a request for pipelines cannot be read"),
    ],
)
def test_who_asks_for_something_else_is_refused_with_both_values(asks: str, words: str) -> None:
    job = request().to_json()
    talk = Talk("a", "b", asks=lambda name: asks if name == "c" else job, pipeliner_for=planned)
    talk.come("c")
    refused = talk.last("c", Refused)
    assert isinstance(refused, Refused)
    assert words in refused.reason


def test_who_asks_for_pipelines_where_the_job_has_none_is_refused() -> None:
    text = request().to_json()
    talk = Talk("a", asks=lambda name: text if name == "b" else "", pipeliner_for=planned)
    talk.come("b")
    refused = talk.last("b", Refused)
    assert isinstance(refused, Refused)
    assert "pipelines of b is 4 layers in 4 micro-batches, the job's (from a) is none" in refused.reason


def test_measured_times_may_differ_and_each_device_is_its_own() -> None:
    asked = request(HALF)
    slow = replace(asked.job, layers=tuple(replace(x, forward_s=9.0) for x in asked.job.layers))
    roomy = replace(slow, devices=(Device(name="big", memory_nbytes=AMPLE),))
    texts = {"a": asked.to_json(), "b": replace(asked, job=roomy).to_json()}
    talk = Talk(asks=lambda name: texts[name], pipeliner_for=planned)
    talk.come("a")
    assert talk.last("a", Decide) is None
    talk.come("b")
    assert isinstance(talk.last("b", Decide), Decide)
    made = talk.machine.pipelining._made
    assert isinstance(made, PlannedPipeliner)
    assert made._last is not None
    assert made._last[2].profile.layers[0].forward_s == 1.0, "the oldest member's word counts"


# ------------------------------------------------------------------ losses


def test_a_loss_is_rerouted_and_the_decision_is_noted_with_what_it_was_chosen_among() -> None:
    talk = talk_of("a", "b", "c", "d", asks=request(HALF), min_nodes=3)
    talk.commit()
    talk.wait(5.0)
    loses(talk, "d")
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert talk.names(decision.view.ids()) == "a b c"
    assert "pipelines: " in decision.view.reason
    event = noted(talk, "pipelines")[-1]
    assert event["view"] == str(decision.view.id)
    assert event["candidates"][event["chosen"]]["name"].endswith("reroute")
    assert talk.machine.snapshot()["pipelines"] == "2 x 2, 1 vacant"
    made = talk.machine.pipelining._made
    assert isinstance(made, PlannedPipeliner)
    assert (made._history.losses, made._history.sizes) == (1, {1: 1})
    assert made._history.device_s > 4 * 4.0


def test_a_loss_before_the_first_step_begins_with_another_first_plan() -> None:
    """A member dies before the first step: the others initialise its parts, so none is lost, and a new plan is made
    (P14).
    """
    talk = talk_of("a", "b", "c", asks=request(HALF, policy="restart"), min_nodes=2)
    before = talk.view
    running = next(m for m in "abc" if division(before).owned(talk.ids[m]) != ((4, 5),))
    talk.die(running)
    for name in list(talk.conns):
        talk.reports(name, before, division(before).made(talk.ids[name]))
    decision = talk.last(next(iter(talk.conns)), Decide)
    assert isinstance(decision, Decide)
    assert decision.base == GENESIS
    assert len(decision.view.members) == 2
    assert division(decision.view).everything == ((0, 5),)


def test_history_counts_a_node_as_one_and_leaves_as_none() -> None:
    made = PlannedPipeliner({})
    them = [Member(f"m~{i}", "m", "h", "127.0.0.1", 1, node=f"node{i // 2}") for i in range(6)]

    def view(*numbers: int, leaving: tuple[int, ...] = ()) -> View:
        return View(NO_VIEW, NO_VIEW, tuple(them[i] for i in numbers), leaving=tuple(them[i] for i in leaving))

    made.followed(None, view(0, 1, 2, 3), 10.0)
    made.followed(view(0, 1, 2, 3), view(2, 3), 20.0)
    made.followed(view(2, 3), view(3, leaving=(2,)), 30.0)
    made.followed(view(3, leaving=(2,)), view(3, 4, 5), 40.0)
    history = made._history
    assert (history.losses, history.sizes, history.device_s) == (1, {1: 1}, 40.0 + 20.0 + 10.0)
    assert history.returned == 0.5 + 2


def test_a_scheduler_that_is_started_anew_hears_again_what_members_ask_for() -> None:
    talk = talk_of("a", "b", "c", "d", asks=request(HALF), min_nodes=3)
    talk.commit()
    view = talk.view
    chain = fx.Chain(2, ViewId(1, 9), (view,), id="c")
    talk.machine = SchedulerMachine(Settings(min_nodes=3), chain, planned)
    talk.now += 1.0
    for name in "abcd":
        talk.come_back(name)
    talk.wait(0.2)
    if talk.machine.phase is SchedulerPhase.PREPARING:  # the number that was promised lies behind the view
        for name in "abcd":
            talk.reports(name, view, talk.owned(name, view))
        assert talk.view.pipelines == view.pipelines
        talk.all_stand()
    loses(talk, "d")
    decision = talk.last("a", Decide)
    assert isinstance(decision, Decide)
    assert talk.names(decision.view.ids()) == "a b c"


def test_a_member_that_comes_back_with_another_model_trains_on_elsewhere() -> None:
    talk = talk_of("a", "b", min_nodes=2)
    view = talk.view
    talk.machine = SchedulerMachine(Settings(min_nodes=2), fx.Chain(2, view.id, (view,), id="c"), planned)
    talk.asks = lambda name: request(layers=6).to_json() if name == "a" else ""
    for name, asks in (("a", "6 layers in 4 micro-batches"), ("b", "none")):
        talk.hello(name, resume=talk.ids[name], view=view.id, term=1, chain="c", pid=talk.pids[name])
        refused = talk.last(name, Refused)
        assert isinstance(refused, Refused)
        assert refused.retry
        assert f"are {asks}, those of view {view.id} are 4 layers in 4 micro-batches" in refused.reason


# ------------------------------------------------------------------ better plans


class Lopsided(PlannedPipeliner):
    """Pipeliner that founds jobs with deliberately bad pipelines."""

    def reroute(self, before: str, members: Sequence[Member], **more: Any) -> PipelineChoice:
        if before:
            return super().reroute(before, members, **more)
        a, b, *others = (m.id for m in members)
        row = Pipeline((PlanStage(a, 0, 3), PlanStage(b, 3, 4)), 4)
        plan = PipelinePlan(4, (row,), idle=tuple(sorted(others)))
        return PipelineChoice(text=ViewPipelines.of(plan).to_json(), reason="any will do")


def lopsided(*names: str) -> Talk:
    text = request().to_json()
    return Talk(*names, workers=len(names), asks=lambda name: text, pipeliner_for=Lopsided)


def test_a_better_plan_is_asked_for_and_rides_on_the_next_header() -> None:
    talk = lopsided("a", "b")
    before = talk.view
    talk.wait(0.1)
    (search,) = talk.searches
    assert {d["name"] for d in json.loads(search.wish)["job"]["devices"]} == set(before.ids())
    talk.wait(3.0)
    assert len(talk.searches) == 1, "once for these members"
    talk.feed(searched(search))
    after = talk.view
    assert (after.ids(), after.joiners, after.leaving) == (before.ids(), (), ())
    assert isinstance(talk.last("a", NextView), NextView)
    assert isinstance(talk.last("b", NextView), NextView)
    assert after.pipelines != before.pipelines
    assert after.reason.startswith("better pipelines were found for the same members; pipelines: move by searched")
    event = noted(talk, "pipelines")[-1]
    assert (event["view"], event["moved_nbytes"] > 0) == (str(after.id), True)
    talk.commit(after)
    for name in "ab":
        talk.stand(name)
    talk.wait(3.0)
    assert (talk.view, len(talk.searches)) == (after, 1)


def test_a_plan_that_does_not_pay_stays_and_says_so() -> None:
    talk = talk_of("a", "b", min_nodes=2)
    view = talk.view
    talk.wait(0.1)
    talk.feed(searched(talk.searches[-1]))
    talk.wait(0.2)
    assert talk.view is view
    assert noted(talk, "pipelines")[-1]["view"] == str(view.id)
    assert noted(talk, "pipelines")[-1]["reason"]


@pytest.mark.parametrize("stale", [True, False])
def test_a_planner_that_fails_is_survived_and_an_answer_for_other_members_is_dropped(*, stale: bool) -> None:
    talk = lopsided("a", "b", "c")
    view = talk.view
    talk.wait(0.1)
    (search,) = talk.searches
    if stale:
        talk.commit()
        loses(talk, "c")
        talk.wait(0.1)
        talk.feed(searched(search))
        assert talk.names(talk.view.ids()) == "a b"
        assert talk.view.reason.count("better") == 0
        talk.all_stand()
        talk.wait(3.0)
        assert len(talk.searches) == 2, "the others are asked for, too"
    else:
        talk.feed(fx.PipelinesFound(search.token, None, "the process that draws plans ended with code -9"))
        texts = [note["text"] for note in noted(talk, "notice")]
        assert texts[-1] == "the pipelines stay: the process that draws plans ended with code -9"
        talk.wait(0.5)
        assert talk.view is view


def test_a_planner_that_fails_ends_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner raises an error: newcomers wait with the reason in the log, as do survivors of a death, until it
    works again.
    """

    def fails(*_: object, **__: object) -> PipelineChoice:
        raise ZeroDivisionError("units")

    talk = talk_of("a", "b", min_nodes=2)
    view, words = talk.view, "the planner failed: ZeroDivisionError: units"
    with monkeypatch.context() as broken:
        broken.setattr(PlannedPipeliner, "reroute", fails)
        talk.come("c")
        talk.stand("c")
        talk.wait(1.0)
        assert talk.view is view
        talk.commit()
        talk.die("b")
        talk.reports("a", view, talk.owned("a", view))
        talk.wait(1.0)
        assert talk.view is view
        assert noted(talk, "pipelines")[-1]["reason"] == words
    talk.come("d")
    talk.wait(1.0)
    assert talk.view is not view


def test_nothing_moves_for_a_better_plan_while_somebody_is_about_to_leave() -> None:
    talk = lopsided("a", "b", "c")
    talk.wait(0.1)
    (search,) = talk.searches
    talk.say("a", Leave("Ctrl+C"))
    talk.feed(searched(search))
    assert "better" not in talk.view.reason
    talk.wait(1.2)
    assert talk.names(talk.view.ids()) == "b c"
    assert talk.names(tuple(m.id for m in talk.view.leaving)) == "a"


# ------------------------------------------------------------------ slow members


def settled_with(*names: str) -> Talk:
    """Returns a job whose first search for a better plan found none."""
    talk = talk_of(*names, min_nodes=len(names))
    talk.wait(0.1)
    talk.feed(searched(talk.searches[-1]))
    talk.wait(3.0)
    assert len(talk.searches) == 1
    return talk


def wished(talk: Talk) -> dict[str, float]:
    """Returns the members' speeds, by name, in the last request for a plan."""
    return {
        d["name"].partition("~")[0]: d.get("speed", 1.0) for d in json.loads(talk.searches[-1].wish)["job"]["devices"]
    }


def test_a_member_that_has_become_slow_is_planned_around_and_the_event_says_by_how_much() -> None:
    talk = settled_with("a", "b")
    before = talk.view
    talk.speeds = {"a": 1.0, "b": 0.9}
    talk.wait(3.0)
    assert len(talk.searches) == 1, "little changes nothing"
    talk.speeds["b"] = 0.45
    talk.wait(0.1)
    assert (len(talk.searches), wished(talk)) == (2, {"a": 1.0, "b": 0.45})
    talk.feed(searched(talk.searches[-1]))
    after = talk.view
    assert (after.ids(), after.pipelines != before.pipelines) == (before.ids(), True)
    event = noted(talk, "pipelines")[-1]
    assert event["view"] == str(after.id)
    assert event["reason"].startswith(f"{talk.ids['b']} computes 2.2 times slower than foreseen; move by searched: ")
    assert event["reason"] in after.reason
    ways = {way["name"]: way["step_s"] for way in event["candidates"]}
    assert ways["searched: move"] < ways["searched: reroute"]
    talk.commit(after)
    for name in "ab":
        talk.stand(name)
    talk.wait(5.0)
    assert (talk.view, len(talk.searches)) == (after, 2)
    talk.speeds["b"] = 1.05
    talk.wait(5.0)
    talk.feed(searched(talk.searches[-1]))
    assert f"{talk.ids['b']} computes 2.2 times faster than foreseen" in talk.view.reason


def tells_of_links(talk: Talk, rate_bps: float, latency_s: float = 0.002) -> None:
    """Makes each member report this rate and latency for its links to all others."""
    for name in talk.conns:
        for other in talk.conns:
            if other != name:
                talk.say(name, LinkReport(talk.ids[other], latency_s, rate_bps, "probe"))
    talk.wait(2.1)


def between_hosts(talk: Talk) -> dict[str, float]:
    """Returns the rate and latency between machines that the last request for a plan contains."""
    found: dict[str, float] = json.loads(talk.searches[-1].wish)["job"].get("between_hosts", {})
    return found


def test_plans_are_made_by_the_links_that_members_measure() -> None:
    talk = settled_with("a", "b")
    assert between_hosts(talk) == {}
    tells_of_links(talk, 1e8)
    assert (len(talk.searches), between_hosts(talk)) == (2, {"rate_bps": 1e8, "latency_s": 0.002})
    talk.feed(searched(talk.searches[-1]))
    (*_, event) = noted(talk, "pipelines")
    assert event["reason"].startswith("links between machines carry 100 Mbps after 2 ms; ")
    talk.wait(10.0)
    tells_of_links(talk, 0.9e8, 0.0022)
    assert len(talk.searches) == 2, "little changes nothing"
    tells_of_links(talk, 1e7)
    assert (len(talk.searches), between_hosts(talk)["rate_bps"]) == (3, 1e7)


def test_a_rate_that_the_profile_names_counts_whatever_is_measured() -> None:
    given = request()
    named = replace(given, job=replace(given.job, between_hosts=LinkRate(rate_bps=5e9, latency_s=0.0)))
    talk = talk_of("a", "b", asks=named, min_nodes=2)
    talk.wait(3.0)
    talk.feed(searched(talk.searches[-1]))
    tells_of_links(talk, 1e8)
    talk.wait(10.0)
    assert (len(talk.searches), between_hosts(talk)["rate_bps"]) == (1, 5e9)


def test_what_is_slow_and_does_not_pay_stays_and_says_so() -> None:
    talk = settled_with("a", "b")
    view = talk.view
    talk.speeds = {"a": 1.0, "b": 0.8}
    talk.wait(0.1)
    talk.feed(searched(talk.searches[-1]))
    assert (talk.view, len(talk.searches)) == (view, 2)
    event = noted(talk, "pipelines")[-1]
    assert event["reason"].startswith(f"{talk.ids['b']} computes 1.2 times slower than foreseen; keep by searched")
    assert talk.machine.snapshot()["estimated_step_s"] == event["step_s"]


def test_a_plan_that_was_searched_is_judged_by_the_newest_speeds() -> None:
    talk = talk_of("a", "b", min_nodes=2)
    talk.wait(0.1)
    talk.speeds = {"a": 1.0, "b": 0.5}
    talk.wait(0.1)
    talk.feed(searched(talk.searches[-1]))
    assert noted(talk, "pipelines")[-1]["step_s"] == 24.0 / 0.5


def test_members_that_all_are_slower_than_foreseen_are_estimated_so_and_not_planned_anew() -> None:
    talk = settled_with("a", "b")
    talk.speeds = {"a": 0.5, "b": 0.52}
    talk.wait(5.0)
    assert len(talk.searches) == 1
    wish = talk.machine.pipelining.wish(talk.view)
    assert wish is not None
    assert {d["speed"] for d in json.loads(wish)["job"]["devices"]} == {0.5}
    rows = talk.machine.snapshot()["members"]
    assert isinstance(rows, list)
    assert [row["speed"] for row in rows] == [0.5, 0.52]


def test_a_speed_that_wavers_has_plans_searched_ever_less_often() -> None:
    talk = settled_with("a", "b")

    def waver(times: int) -> int:
        asked = len(talk.searches)
        for number in range(times):
            talk.speeds = {"a": 1.0, "b": 0.4 if number % 2 else 1.0}
            talk.wait(1.0)
            if talk.machine.search._out:
                talk.feed(fx.PipelinesFound(talk.searches[-1].token, None, "nothing is better"))
        return len(talk.searches) - asked

    assert 3 <= waver(61) <= 5, "after 2 s, 4 s, 8 s, ..."
    talk.now += 600.0
    talk.wait(0.1)
    assert 2 <= waver(10) <= 4, "it was quiet for long"


def test_nothing_is_asked_while_a_search_is_out_and_the_newest_speeds_after_that() -> None:
    talk = settled_with("a", "b", "c")
    talk.speeds = {"a": 1.0, "b": 1.0, "c": 0.5}
    talk.wait(0.1)
    talk.speeds["b"] = 0.3
    talk.wait(20.0)
    assert len(talk.searches) == 2
    talk.feed(fx.PipelinesFound(talk.searches[-1].token, None, "it took too long"))
    assert (len(talk.searches), wished(talk)) == (3, {"a": 1.0, "b": 0.3, "c": 0.5})


def test_a_scheduler_that_is_started_anew_hears_again_how_fast_members_are() -> None:
    talk = settled_with("a", "b")
    view = talk.view
    talk.speeds = {"a": 1.0, "b": 0.3}
    talk.machine = SchedulerMachine(Settings(min_nodes=2), fx.Chain(2, view.id, (view,), id="c"), planned)
    talk.now += 1.0
    for name in "ab":
        talk.come_back(name)
    talk.wait(0.2)
    talk.feed(searched(talk.searches[-1]))  # asked before the first heartbeats
    talk.wait(2.0)
    assert wished(talk) == {"a": 1.0, "b": 0.3}


# ------------------------------------------------------------------ steps that take longer


def beside_layers(talk: Talk) -> tuple[float, float]:
    """Returns the measured costs, in seconds, of a unit and of the end of a step beyond the layers' own times."""
    found = talk.machine.snapshot()["overheads"]
    assert isinstance(found, dict)
    assert found["hop_s"] == 0.0
    return found["unit_s"], found["commit_s"]


def test_what_steps_take_beyond_layers_is_in_the_estimates_of_the_next_plan() -> None:
    talk = talk_of("a", "b", "c", "d", asks=request(HALF), min_nodes=3)
    first = noted(talk, "pipelines")[-1]
    assert first["view"] == str(talk.view.id)
    assert "overheads" not in talk.machine.snapshot()
    talk.steps = dict.fromkeys("abcd", (first["step_s"] + 1.0, 1.0))
    talk.wait(5.0)
    assert beside_layers(talk) == (0.0, pytest.approx(1.0))
    assert talk.machine.snapshot()["estimated_step_s"] == first["step_s"]
    talk.commit()
    loses(talk, "d")
    assert talk.names(talk.view.ids()) == "a b c"
    event = noted(talk, "pipelines")[-1]
    devices = tuple(Device(name=m.id, memory_nbytes=HALF) for m in talk.view.members)
    plan = ViewPipelines.from_json(talk.view.pipelines).plan
    assert event["step_s"] == pytest.approx(estimate(replace(request().job, devices=devices), plan).step_s + 1.0)
    assert "overheads" not in talk.machine.snapshot(), "what was told is of the view before"


def test_the_end_of_a_step_alone_is_what_steps_take_longer_where_units_take_what_is_foreseen() -> None:
    talk = settled_with("a", "b")
    talk.steps = dict.fromkeys("ab", (25.5, 1.5))
    talk.wait(0.1)
    assert beside_layers(talk) == pytest.approx((0.0, 1.5))
    talk.steps = dict.fromkeys("ab", (25.5, 0.0))
    talk.wait(0.1)
    assert beside_layers(talk) == pytest.approx((0.0, 1.5)), "members of an older version do not tell what lies between"
    talk.steps = dict.fromkeys("ab", (25.5, 50.0))
    talk.wait(0.1)
    assert beside_layers(talk) == pytest.approx((0.0, 1.5)), "no end is longer than what the step takes longer"


def test_steps_that_take_less_than_their_layers_have_no_costs_below_zero() -> None:
    talk = settled_with("a", "b")
    talk.steps = dict.fromkeys("ab", (0.1, 0.1))
    talk.wait(0.1)
    assert beside_layers(talk) == pytest.approx((0.0, 0.0))
    assert json.loads(talk.machine.pipelining.wish(talk.view) or "")["job"].get("overheads") is None


def test_members_that_are_slower_than_foreseen_do_not_count_twice() -> None:
    talk = settled_with("a", "b")
    talk.speeds, talk.steps = {"a": 0.5, "b": 0.5}, dict.fromkeys("ab", (48.25, 0.25))
    talk.wait(3.0)
    assert beside_layers(talk) == pytest.approx((0.0, 0.25))


def test_a_profile_that_knows_what_steps_take_is_followed_until_the_job_has_measured_it() -> None:
    known = request()
    known = replace(known, job=replace(known.job, overheads=Overheads(commit_s=3.0)))
    talk = talk_of("a", "b", asks=known, min_nodes=2)
    assert noted(talk, "pipelines")[0]["step_s"] == 27.0
    talk.steps = dict.fromkeys("ab", (28.0, 4.0))
    talk.wait(0.1)
    assert beside_layers(talk) == pytest.approx((0.0, 4.0))


def test_plans_keep_costs_that_have_changed_little() -> None:
    talk = settled_with("a", "b")
    for between_s, counted_s in ((1.0, 1.0), (1.1, 1.0), (1.3, 1.3)):
        talk.steps = dict.fromkeys("ab", (24.0 + between_s, between_s))
        talk.wait(0.1)
        wish = json.loads(talk.machine.pipelining.wish(talk.view) or "")
        assert job_of(wish["job"], "the wish").overheads.commit_s == pytest.approx(counted_s)


def test_a_scheduler_that_is_started_anew_hears_again_how_long_steps_take() -> None:
    talk = settled_with("a", "b")
    view = talk.view
    talk.machine = SchedulerMachine(Settings(min_nodes=2), fx.Chain(2, view.id, (view,), id="c"), planned)
    talk.now += 1.0
    talk.steps = dict.fromkeys("ab", (26.0, 2.0))
    for name in "ab":
        talk.come_back(name)
    talk.wait(0.2)
    assert beside_layers(talk) == pytest.approx((0.0, 2.0))


# ------------------------------------------------------------------ ends


def test_a_job_whose_parts_are_lost_ends_with_their_names_and_the_newest_checkpoint() -> None:
    talk = talk_of("a", "b", asks=request(HALF, on_lost_parts="end"), min_nodes=2)
    talk.say("a", Saved(2, "/run/old.ckpt"))
    talk.say("b", Saved(3, "/run/step3.ckpt"))
    talk.say("a", Saved(1, "/run/oldest.ckpt"))
    lost = ", ".join(f"block.{part}" for part in numbers(talk.owned("a")) if part < 4)
    talk.commit()
    talk.wait(0.1)
    loses(talk, "a")
    fence = talk.last("b", Fence)
    assert isinstance(fence, Fence)
    assert (fence.over, fence.rejoin) == (True, False)
    assert f"{lost} of the training state (step 1 or later) are at no member that lives" in fence.reason
    assert fence.reason.endswith("so the job ends; the newest checkpoint is /run/step3.ckpt (step 3)")
    assert talk.machine.phase is SchedulerPhase.FINISHED
    assert [done.again for done in talk.done] == [True]
    assert noted(talk, "ended")[0]["reason"] == fence.reason


def test_a_job_whose_parts_are_lost_waits_if_that_is_asked_for() -> None:
    talk = talk_of("a", "b", asks=request(HALF), min_nodes=2)
    talk.commit()
    loses(talk, "a")
    assert talk.last("b", Fence) is None
    notice = talk.last("b", Notice)
    assert isinstance(notice, Notice)
    assert "training waits: block." in notice.text
    assert "no member has told of a checkpoint" in notice.text
    assert not talk.done


def test_a_loss_ends_a_job_that_is_to_restart_and_a_leave_does_not() -> None:
    talk = talk_of("a", "b", "c", "d", "e", asks=request(HALF, policy="restart"), min_nodes=3)
    by = division(talk.view)
    idle = next(m for m in "abcde" if by.owned(talk.ids[m]) == ((4, 5),))
    talk.commit()
    loses(talk, idle)  # it ran nothing
    assert not talk.done
    talk.all_stand()
    running = next(iter(talk.conns))
    talk.say(running, Saved(7, "/run/step7.ckpt"))
    loses(talk, running)
    for name in talk.conns:
        fence = talk.last(name, Fence)
        assert isinstance(fence, Fence)
        assert fence.over
        assert "policy restart: member" in fence.reason
        assert fence.reason.endswith("the newest checkpoint is /run/step7.ckpt (step 7)")
    assert [done.again for done in talk.done] == [True]
    assert not talk.searches, "such a job never moves to a better plan"


# ------------------------------------------------------------------ any members, any links


@st.composite
def _requests(draw: st.DrawFn) -> PipelineRequest:
    layers = tuple(
        Layer(
            name=f"block.{i}",
            forward_s=draw(st.floats(0.1, 2.0)),
            backward_s=draw(st.floats(0.1, 2.0)),
            parameter_nbytes=draw(st.integers(1, 20)),
            activation_nbytes=draw(st.integers(0, 5)),
        )
        for i in range(draw(st.integers(1, 6)))
    )
    users = st.sets(st.integers(0, len(layers) - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    shared = draw(st.dictionaries(st.sampled_from("vw"), users, max_size=2)) if len(layers) > 1 else {}
    device = Device(name="me", memory_nbytes=AMPLE)
    job = TrainingJob(layers=layers, devices=(device,), micro_batches=draw(st.integers(1, 6)))
    return PipelineRequest(job, draw(st.sampled_from(PIPELINE_POLICIES)), draw(st.integers(1, 3)), shared)


def _holds(text: str, members: Sequence[Member], asked: PipelineRequest, links: frozenset[frozenset[str]]) -> Division:
    """Checks that pipelines (as text) have all that a view needs; returns how they divide the state."""
    pipelines = ViewPipelines.from_json(text)
    parts = Division(tuple(m.id for m in members), pipelines)
    assert parts.apart(tuple(x) for x in links) == ""  # type: ignore[misc]
    layers = [f"layer.{x}" for x in range(len(asked.job.layers))]
    assert parts.names == (*layers, *(f"shared.{name}" for name in sorted(asked.shared)), "rest")
    assert union(span for m in members for span in parts.owned(m.id)) == parts.everything
    units = {m.id: pipelines.units(m.id) for m in members}
    given = {m: coverage(found) for m, found in units.items()}
    assert coverage_error(parts.layer_count, [(0, asked.job.micro_batches)], given) == ""
    for me, found in units.items():
        assert all(pair(me, u.to) in links for u in found if u.to), "a tensor goes where no link leads"
    return parts


@given(st.data(), _requests())
@settings(max_examples=150, deadline=None)
def test_texts_divide_the_state_whoever_comes_and_goes(data: st.DataObject, asked: PipelineRequest) -> None:
    requests: dict[str, PipelineRequest] = {}
    made, number = PlannedPipeliner(requests), 0

    def newcomers(least: int, most: int) -> list[Member]:
        nonlocal number
        found = []
        for _ in range(data.draw(st.integers(least, most))):
            name = f"m{number}"
            node = data.draw(st.sampled_from(["", "n1"]))
            member = Member(f"{name}~{number}", name, f"h{number % 2}", "127.0.0.1", 1, node=node)
            memory = data.draw(st.sampled_from([AMPLE, 60]))
            job = replace(asked.job, devices=(Device(name="me", memory_nbytes=memory, speed=1.0 + number % 2),))
            if data.draw(st.integers(0, 9)):  # one in ten has not told yet
                requests[member.id] = replace(asked, job=job)
            number += 1
            found.append(member)
        return found

    def linked(members: Sequence[Member]) -> frozenset[frozenset[str]]:
        ids = [m.id for m in members]
        every = every_pair(ids)
        broken = data.draw(st.sets(st.sampled_from(sorted(every, key=sorted)), max_size=2)) if every else set()
        return every - broken if connected(ids, every - broken) else every

    members = newcomers(1, 5)
    links = linked(members)
    choice = made.reroute("", members, links=links)
    if not choice.text:
        assert choice.reason
        return
    parts = _holds(choice.text, members, asked, links)
    for _ in range(data.draw(st.integers(1, 4))):
        fates = {m.id: data.draw(st.sampled_from(["stays"] * 4 + ["dies", "leaves"])) for m in members}
        leaving = [m for m in members if fates[m.id] == "leaves"]
        stayed = [m for m in members if fates[m.id] == "stays"]
        held = {m.id: parts.owned(m.id) for m in (*stayed, *leaving)}
        before, members = choice.text, [*stayed, *newcomers(0, 2)]
        if not members:
            return
        links = linked(members)
        whole: tuple[Span, ...] = union(span for spans in held.values() for span in spans)
        choice = made.reroute(before, members, leaving=leaving, held=held, links=links)
        assert made.reroute(before, members, leaving=leaving, held=held, links=links) == choice
        if choice.ends:
            assert asked.policy == "restart"
        if not choice.text:
            assert choice.reason
            return
        layers = tuple((x, x + 1) for x in range(parts.layer_count))
        assert not subtract(union(layers), whole), "layers are nowhere, and there are pipelines all the same"
        parts = _holds(choice.text, members, asked, links)


@pytest.mark.parametrize("broken", ["a b", "b c", "a c"])
def test_stages_are_seated_where_links_lead(broken: str) -> None:
    asked = request(10, layers=3)  # each holds one layer
    members = [Member(f"{n}~{i}", n, f"h{n}", "127.0.0.1", 1) for i, n in enumerate("abc")]
    made = PlannedPipeliner({m.id: asked for m in members})
    ids = {m.name: m.id for m in members}
    links = every_pair([m.id for m in members]) - {frozenset(ids[n] for n in broken.split())}
    choice = made.reroute("", members, links=links)
    _holds(choice.text, members, asked, links)
    # A link that breaks later is done without, too, and parts move.
    whole = made.reroute("", members, links=every_pair(list(ids.values())))
    roomy: Callable[[PipelineRequest], PipelineRequest] = lambda x: replace(  # noqa: E731
        x, job=replace(x.job, devices=(Device(name="me", memory_nbytes=30),))
    )
    made = PlannedPipeliner({m.id: roomy(asked) for m in members})
    held = {m: Division(tuple(ids.values()), ViewPipelines.from_json(whole.text)).owned(m) for m in ids.values()}
    _holds(made.reroute(whole.text, members, held=held, links=links).text, members, asked, links)
    none = made.reroute("", members[:2], links=frozenset())
    assert (none.text, "link" in none.reason) == ("", True)


def test_nobody_who_has_told_nothing_is_planned_for() -> None:
    member = Member("a~1", "a", "h", "127.0.0.1", 1)
    choice = PlannedPipeliner({}).reroute("", [member])
    assert (choice.text, choice.reason) == ("", "no member has told what the model is like")


def test_a_member_whose_job_has_ended_is_out_for_good_and_says_that_all_are() -> None:
    machine = MemberMachine()
    effects = machine.on(0.0, fx.ControlIn(Fence("it is over", rejoin=False, over=True)))
    assert effects[-1] == fx.Ejected("it is over", rejoin=False, over=True)
