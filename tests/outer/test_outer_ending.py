"""How a leader ends a job (outer/rules/ending.py)."""

from __future__ import annotations

from dataclasses import replace

from leader_rig import Rig

from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, Offer, PushAnswer, PushId, VersionId
from lab.outer.processes import product


def rolled_back_at_its_end(*, asked: bool) -> tuple[Rig, IncarnationId, Offer]:
    """Returns a job that was about to end when a rollback reopened an accepted push of its oldest cluster, which is
    alive.
    """
    rig = Rig()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    gone = rig.comes("gone", 3)
    rig.full = True  # so what is decided now is not durable
    rig.push(gone, 1)
    rig.push(home, 2)
    offer = rig.machine.chain.incarnations[home].answers[2].offer
    rig.feed(fx.Heard(2, say.LoopEnded(home, "it is through")) if not asked else fx.EndAsked("an operator asked"))
    assert rig.shown["phase"] == "ending"
    rig.feed(fx.StreamClosed(1))
    rig.feed(fx.StreamClosed(3, proof=True))
    (first,) = [version for version, _ in rig.machine.chain.durable]
    rig.feed(fx.Heard(1, say.FollowerHello("f", "m", 1, (say.ShardFile(first, "digest"),), first)))
    rig.feed(fx.Heard(1, say.Missing("f", PushId(gone, 1))))
    assert rig.machine.chain.rollbacks == 1
    assert [*rig.machine.chain.reopened] == [offer.push]
    rig.full = False
    return rig, home, offer


def test_what_a_rollback_opens_again_is_answered_before_the_job_ends() -> None:
    """Former bug: after a rollback no further round was decided, and the job's end made the reopened push void."""
    rig, home, offer = rolled_back_at_its_end(asked=False)
    newest, chain = rig.machine.chain.newest, rig.machine.chain
    rig.feed(fx.Heard(1, say.Written("f", newest, "digest")))
    rig.feed(fx.Heard(2, say.LoopEnded(home, "it is through")))  # it was on its way when the rollback was decided
    rig.now += 100.0
    rig.feed(fx.Heard(2, say.Beat(home, 1.0, 1.0, newest, 0, 0, False)))
    assert chain.ended is None
    rig.feed(fx.Heard(2, say.Offered(offer)))
    products = (say.PushProduct(offer.push, product(offer.push, offer.push)),)
    rig.feed(fx.Heard(1, say.Staged("f", offer.push, offer.manifest, products, True, at=newest)))
    assert chain.incarnations[home].answers[2].answer is PushAnswer.ACCEPTED
    rig.feed(fx.Heard(2, say.Beat(home, 1.0, 1.0, chain.newest, 0, 0, False)))
    rig.feed(fx.Heard(2, say.LoopEnded(home, "it is through")))
    assert chain.ended is not None
    assert (chain.ended.version, chain.ended.reason) == (chain.newest, "home~1 says: it is through")


def ended(rig: Rig) -> VersionId:
    """Ends a job by an operator's request; returns its last version."""
    home = rig.comes("home", 2)
    rig.push(home, 1)
    rig.feed(fx.EndAsked("an operator asked"))
    assert rig.machine.desk.done
    assert rig.machine.chain.ended is not None
    return rig.machine.chain.ended.version


def said(effects: list[fx.LeaderEffect], conn: int) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, fx.SendTo) and effect.conn == conn]


def test_who_comes_after_the_end_is_told_where_the_last_version_is() -> None:
    rig = Rig()
    last = ended(rig)
    hello = say.ClusterHello(
        "away", "here", "n", 1, None, NO_VERSION, last, rig.agreed, job_id=rig.machine.chain.job_id
    )
    progress = rig.machine.chain.progress(last)
    words = [rig.machine.shards.holders(), say.Served(1, last, progress), say.JobFinished(1, last, "an operator asked")]
    assert said(rig.machine.farewell(9, hello), 9) == words
    stranger = replace(hello, job_id="another")
    (refused,) = (e for e in rig.machine.farewell(9, stranger) if not isinstance(e, fx.OuterNote))
    assert isinstance(refused, fx.HangUp)


def test_a_server_that_starts_after_the_end_has_the_last_version_loaded_for_who_comes() -> None:
    """Former bug: followers that started after a job's end were told to end at once, so that nobody could serve the
    last version.
    """
    rig = Rig()
    last = ended(rig)
    again = LeaderMachine(rig.machine.chain, 2, 1)
    hello = say.ClusterHello(
        "away", "here", "n", 1, None, NO_VERSION, last, rig.agreed, job_id=rig.machine.chain.job_id
    )
    told = said(again.on(1.0, fx.Heard(3, hello)), 3)
    assert isinstance(told[-1], say.JobFinished)
    file = say.ShardFile(last, "digest")
    effects = again.on(1.1, fx.Heard(1, say.FollowerHello("f", "new", 1, (file,), NO_VERSION, "here:1", job_id="")))
    (obey,) = (each for each in said(effects, 1) if isinstance(each, say.Obey))
    assert (obey.nonce, obey.durable[-1]) == ("new", file)
    effects = again.on(1.2, fx.Heard(1, say.Applied("f", last)))
    assert say.JobFinished(2, last, "an operator asked") in said(effects, 1)
    (holders,) = said(effects, 3)
    assert isinstance(holders, say.Holders)
    assert holders.holders[0].endpoint == "here:1"
    assert again.chain.last == rig.machine.chain.last, "nothing is stored after the end"


def test_an_operator_ends_a_job_that_was_rolled_back() -> None:
    rig, _, _ = rolled_back_at_its_end(asked=True)
    rig.feed(fx.Heard(1, say.Written("f", rig.machine.chain.newest, "digest")))
    assert rig.machine.chain.ended is not None
    assert rig.machine.chain.ended.reason == "an operator asked"


def test_an_operator_ends_a_job_that_lost_its_first_version() -> None:
    """Former bug: a job that lost its first version could not be ended, since no version could become durable any
    more.
    """
    rig = Rig(full=True)
    gone = rig.comes("gone", 2)
    rig.push(gone, 1)
    rig.feed(fx.EndAsked("an operator asked"))
    rig.feed(fx.StreamClosed(1))
    rig.feed(fx.StreamClosed(2, proof=True))
    rig.feed(fx.Heard(1, say.FollowerHello("f", "m", 1, (), NO_VERSION)))
    rig.feed(fx.Heard(1, say.Missing("f", PushId(gone, 1))))
    chain = rig.machine.chain
    assert chain.rollbacks == 1
    assert not chain.founded
    assert chain.ended is not None
    assert chain.ended.version == NO_VERSION
