"""A leader that takes over continues with the gate, arrivals, rates and paces of the one before, since each round in
the chain contains them (O12).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.arrivals import FADE, ArrivalRates
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.effects import Heard, SendTo
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.types import Entry, Round
from lab.outer.plans import fragile_plan
from lab.outer.world import World


@pytest.mark.parametrize("policy", ["robust", "di_ps"])
def test_who_takes_over_judges_as_the_one_before_would_have(policy: str) -> None:
    plan = fragile_plan(9)
    world = World(replace(plan, settings=replace(plan.settings, policy=policy)))
    taught: list[ArrivalRates] = []
    paced: list[int] = []

    def take_over(entry: Entry) -> None:
        if not isinstance(entry.body, Round) or world.leader is None:
            return
        old, chain = world.leader.machine, OuterChain()
        for each in world.entries:
            chain.follow(each)
        new = LeaderMachine(chain, old.term + 1)
        assert new.rounds.rates == entry.body.rates
        if old.rounds.rates != new.rounds.rates:  # this round's version is fetched already: it is in the next record
            assert old.rounds.rates.rounds == pytest.approx(FADE * new.rounds.rates.rounds + 1)
        assert chain.gate == entry.body.gate
        taught.append(new.rounds.rates)
        for conn, each in enumerate(entry.body.paced):
            was, who = old.clusters[each.incarnation], each.incarnation
            word = say.ClusterHello(
                who.cluster, "a test", "n", 1, who, was.base, was.base, old.chain.agreement or pytest.fail("no job")
            )
            told = [effect.message for effect in new.on(1.0, Heard(conn, word)) if isinstance(effect, SendTo)]
            (pace,) = [message.steps for message in told if isinstance(message, say.Paced)]
            assert pace == (each.steps or world.settings.inner_steps)
            now = new.clusters[who]
            assert (now.rate, now.step_rate, now.steps) == (was.rate, was.step_rate, each.steps)
            paced.append(now.steps)

    world.on_entry = take_over
    assert world.run().violation == ""
    assert len({*taught}) > 5
    assert len({*paced}) > 2 if policy == "robust" else {*paced} == {0}
