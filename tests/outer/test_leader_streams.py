"""Tests on which of a cluster's streams a leader answers."""

from __future__ import annotations

import pytest

from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules.chain import OuterChain
from chaos_lightning.outer.rules.leader import LeaderMachine
from chaos_lightning.outer.rules.messages import Beat, ClusterHello, Dismissed, FollowerHello, Offered, Welcomed
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import (
    NO_VERSION,
    Cut,
    Founded,
    IncarnationId,
    JobOpened,
    Joined,
    Offer,
    PushId,
)
from lab.outer.processes import agreement


def fed(machine: LeaderMachine, event: fx.LeaderEvent) -> list[fx.LeaderEffect]:
    """Returns the effects of this event, with all entries that it leads to stored at once."""
    found, waiting = [], [event]
    while waiting:
        for effect in machine.on(1.0, waiting.pop(0)):
            found.append(effect)
            if isinstance(effect, fx.StoreEntry):
                waiting.append(fx.EntryStored(True))
    return found


def test_a_rank_that_is_gone_and_says_hello_last_takes_nobodys_place() -> None:
    """Former bug: if a cluster had two streams and the one with the later hello ended, the leader forgot the cluster
    and never let it in.
    """
    machine, agreed = LeaderMachine(OuterChain(), 1, 1), agreement(OuterSettings(), 0)
    hello = ClusterHello("e", "here", "n", 0, None, NO_VERSION, NO_VERSION, agreed)
    machine.on(1.0, fx.Heard(3, hello))
    machine.on(1.0, fx.Heard(2, hello))  # of a stream that is older
    fed(machine, fx.StreamClosed(2))
    fed(machine, fx.EntryStored(True))
    told = fed(machine, fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
    assert [e.conn for e in told if isinstance(e, fx.SendTo) and isinstance(e.message, Welcomed)] == [3]


def test_two_clusters_of_one_name_that_wait_at_once_are_both_answered() -> None:
    """Former bug: if two clusters of one name waited to be let in, the first one waited for ever."""
    machine, agreed = LeaderMachine(OuterChain(), 1, 1), agreement(OuterSettings(), 0)
    for conn, nonce in ((2, "n"), (3, "another")):
        machine.on(1.0, fx.Heard(conn, ClusterHello("e", "here", nonce, 0, None, NO_VERSION, NO_VERSION, agreed)))
    fed(machine, fx.EntryStored(True))
    told = fed(machine, fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
    told = [(e.conn, type(e.message)) for e in told if isinstance(e, fx.SendTo) and e.conn != 1]
    assert told[0] == (2, Welcomed)
    assert (3, Dismissed) in told


def test_a_cluster_that_had_an_answer_which_the_chain_lacks_proves_an_older_copy() -> None:
    """Former bug: on an older copy of the chain the leader waited for a push that the cluster knew to be answered, and
    never answered the next.
    """
    machine, agreed = LeaderMachine(OuterChain(), 1, 1), agreement(OuterSettings(), 0)
    who = IncarnationId("e", 1)
    fed(machine, fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
    fed(machine, fx.Heard(2, ClusterHello("e", "here", "n", 0, None, NO_VERSION, NO_VERSION, agreed)))
    fed(machine, fx.Heard(2, Offered(Offer(PushId(who, 2), NO_VERSION, "manifest", 0, 0))))
    assert not machine.desk.done, "out of turn it is refused"
    fed(machine, fx.Heard(3, ClusterHello("e", "here", "n", 0, who, NO_VERSION, NO_VERSION, agreed, answered=1)))
    assert "e knows an answer to push e~1/1, which this chain lacks: it is an older copy" in machine.desk.done


def test_a_cluster_whose_last_stream_ended_is_answered_where_it_is_heard() -> None:
    """A rank that was removed says hello after the rank that took over, and its stream ends: the leader answers on the
    other stream, where heartbeats arrive.
    """
    machine, agreed = LeaderMachine(OuterChain(), 1, 1), agreement(OuterSettings(), 0)
    who = IncarnationId("e", 1)

    def hello(conn: int, resume: IncarnationId | None) -> list[fx.LeaderEffect]:
        said = ClusterHello("e", "here", "n", 0, resume, NO_VERSION, NO_VERSION, agreed)
        return fed(machine, fx.Heard(conn, said))

    fed(machine, fx.Heard(1, FollowerHello("f", "n", 0, (), NO_VERSION)))
    hello(2, None)
    hello(4, who)
    hello(3, who)  # of a stream that is older
    fed(machine, fx.StreamClosed(3))
    beat = fx.Heard(4, Beat(who, 0.0, 0.0, NO_VERSION, 0, 0, False))
    told = [e for e in fed(machine, beat) if isinstance(e, fx.SendTo)]
    assert {effect.conn for effect in told} == {4}
    assert isinstance(told[0].message, Welcomed)
    assert not fed(machine, beat)


def test_a_second_cluster_of_a_name_that_comes_first_to_a_new_leader_is_not_let_in() -> None:
    """Former bug: if a second cluster of a name reached a new leader before the first one, both were let in and
    trained.
    """
    chain, agreed = OuterChain(), agreement(OuterSettings(heartbeat_s=1.0), 0)
    who = IncarnationId("home", 1)
    founded = Founded(1, Offer(PushId(who, 1), NO_VERSION, "m", 0, 0))
    for body in (JobOpened(agreed, "a test"), Cut(("f",)), Joined(who, "here"), founded):
        chain.follow(chain.entry(1, body))

    def hello(nonce: str, resume: IncarnationId | None) -> ClusterHello:
        base = chain.newest if resume is not None else NO_VERSION
        return ClusterHello("home", "here", nonce, 1, resume, base, base, agreed)

    machine = LeaderMachine(chain, 2)
    fed(machine, fx.Heard(2, hello("second", None)))
    assert not machine.clusters
    effects = fed(machine, fx.Heard(3, hello("first", who)))
    assert [*machine.clusters] == [who]
    told = {(effect.conn, type(effect.message)) for effect in effects if isinstance(effect, fx.SendTo)}
    assert (3, Welcomed) in told
    assert (2, Dismissed) in told, "it is told now that the name is taken"


@pytest.mark.parametrize("holds_alone", [False, True])
def test_a_name_is_kept_for_a_while_for_who_has_yet_to_come(holds_alone: bool) -> None:
    """Former bug: after a takeover the name of an absent cluster that may be the only one to have a push was unusable
    for ten minutes.
    """
    chain, agreed = OuterChain(), agreement(OuterSettings(reconnect_s=0.5), 0)
    who = IncarnationId("home", 1)
    bodies = [JobOpened(agreed, "a test"), Cut(("f",)), Joined(who, "here")]
    for body in [*bodies, Founded(1, Offer(PushId(who, 1), NO_VERSION, "m", 0, 0))] if holds_alone else bodies:
        chain.follow(chain.entry(1, body))
    machine = LeaderMachine(chain, 2)
    hello = ClusterHello("home", "here", "second", 1, None, NO_VERSION, NO_VERSION, agreed)
    for now, event in ((1.0, fx.Heard(2, hello)), (1.4, fx.TimePassed()), (1.8, fx.TimePassed())):
        waiting: list[fx.LeaderEvent] = [event]
        while waiting:
            stored = [e for e in machine.on(now, waiting.pop()) if isinstance(e, fx.StoreEntry)]
            waiting += [fx.EntryStored(True)] * len(stored)
        assert chain.joined == (1 if now < 1.5 else 2)
    assert ("it has not come back" in chain.over(who)) is not holds_alone
