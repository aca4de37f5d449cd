"""Tests the choice between candidates, with values calculated by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from chaos_lightning.planning.pipelines.choice import KEEP, MOVE, RESTART, Outlook, PlanCandidate, choose, restart_worth

STAY = PlanCandidate(policy="reroute", kind=KEEP, step_s=2.0, samples=60, risk=0.5, devices=30)
GO = PlanCandidate(policy="dynamic", kind=MOVE, step_s=1.0, samples=60, transition_s=100.0, devices=31)


def test_value_is_the_samples_until_the_next_loss_over_its_mean_time() -> None:
    outlook = Outlook(rate=0.01, restart_worth=0.4)
    assert outlook.value(GO) == pytest.approx(60 * math.exp(-1))
    assert outlook.value(STAY) == pytest.approx(30 * (0.5 + 0.5 * 0.4))


def test_value_counts_what_is_done_again_as_a_pause_and_void_samples_as_lost() -> None:
    back = PlanCandidate(policy="restart", kind=RESTART, step_s=1.0, samples=60, redo_s=100.0, void_samples=500.0)
    assert Outlook(rate=0.01).value(back) == pytest.approx(60 * math.exp(-1) - 5.0)


@pytest.mark.parametrize(("rate", "kind"), [(0.0, MOVE), (0.006, MOVE), (0.008, KEEP)])
def test_pause_pays_only_where_losses_are_rare(rate: float, kind: str) -> None:
    # 60 exp(-100 r) = 30 at r = ln 2 / 100 = 0.00693.
    chosen = choose([STAY, GO], Outlook(rate=rate, with_risk=False)).chosen
    assert chosen is not None
    assert chosen.kind == kind


def test_risk_decides_only_where_it_counts() -> None:
    with_risk, without = Outlook(rate=0.008), Outlook(rate=0.008, with_risk=False)
    assert choose([STAY, GO], with_risk).chosen.kind == MOVE  # type: ignore[union-attr]
    assert choose([STAY, GO], without).chosen.kind == KEEP  # type: ignore[union-attr]


def test_return_ends_a_plan_as_a_loss_does() -> None:
    outlook = Outlook(rate=0.01, returns=0.03, restart_worth=0.4)
    assert outlook.value(GO) == pytest.approx(60 * math.exp(-4))
    # The next change is a loss in one of four cases.
    assert outlook.value(STAY) == pytest.approx(30 * (1 - 0.25 * 0.5 * 0.6))


def test_plan_is_kept_where_others_are_better_by_less_than_the_threshold() -> None:
    a_bit = PlanCandidate(policy="dynamic", kind=MOVE, step_s=1.95, samples=60)
    stay = PlanCandidate(policy="reroute", kind=KEEP, step_s=2.0, samples=60)
    decision = choose([stay, a_bit], Outlook(threshold=0.05))
    assert decision.chosen == choose([stay], Outlook()).chosen
    assert "within the threshold of 5.0%" in decision.reason
    assert choose([stay, a_bit], Outlook(threshold=0.01)).chosen.kind == MOVE  # type: ignore[union-attr]


def test_the_same_way_is_compared_once_and_with_another_kind_of_way() -> None:
    same, near = replace(GO, policy="oobleck", about="of templates"), replace(GO, samples=59)
    decision = choose([STAY, GO, same, near], Outlook())
    assert [c.policy for c in decision.candidates] == ["reroute", "dynamic", "dynamic"]
    assert decision.reason.startswith("move by dynamic: 100.0% more samples than to keep by reroute")


def test_what_does_not_fit_is_never_chosen() -> None:
    tight = PlanCandidate(policy="dynamic", kind=MOVE, step_s=0.1, samples=60, lacks="stage 0 lacks 5 bytes")
    decision = choose([tight, STAY], Outlook())
    assert decision.chosen is not None
    assert decision.chosen.policy == "reroute"
    nothing = choose([tight], Outlook())
    assert nothing.chosen is None
    assert nothing.reason == "no plan fits: dynamic: stage 0 lacks 5 bytes"


def test_decision_is_printed_and_stored() -> None:
    decision = choose([STAY, GO], Outlook(rate=0.001), failed=(("mine", "ValueError: no"),))
    told = str(decision)
    assert decision.reason == "move by dynamic: 261.9% more samples than to keep by reroute until the next loss, in " \
        "1e+03 s on average"  # fmt: skip
    assert "* dynamic: move" in told
    assert "mine raised: ValueError: no" in told
    about = json.loads(json.dumps(decision.to_dict()))
    assert about["chosen"] == 1
    assert [c["policy"] for c in about["candidates"]] == ["reroute", "dynamic"]


def test_equal_decisions_are_equal() -> None:
    assert choose([STAY, GO], Outlook(rate=0.001)) == choose([STAY, GO], Outlook(rate=0.001))


def test_restart_is_worth_nothing_where_losses_come_faster_than_it_pays() -> None:
    assert restart_worth(0.001, 400) == pytest.approx(0.6)
    assert restart_worth(0.01, 400) == 0
