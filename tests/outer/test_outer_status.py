"""Tests what a leader's status shows of a job that waits or has troubles (outer/follower/snapshot.py)."""

from __future__ import annotations

from leader_rig import Rig

from chaos_lightning.events.registry import problems
from chaos_lightning.outer.commands.ps import _cluster, _follower
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.types import NO_VERSION, Offer, PushId


def test_windows_that_wait_for_a_disk_say_for_whose() -> None:
    rig = Rig(full=True)
    home = rig.comes("home", 2)
    for number in range(1, 5):
        rig.push(home, number)
    assert rig.machine.chain.ahead == 3
    assert rig.shown["window"] == "3 versions are ahead of the disk: waits for f to save " + str(rig.keep)
    rig.feed(fx.Heard(1, say.Trouble("f", "its disk is full")))
    rig.feed(fx.TimePassed())
    assert "(its disk is full)" in rig.shown["window"]
    for _ in range(2):
        rig.feed(fx.Heard(1, say.Written("f", rig.keep, "digest")))
    assert rig.shown["window"] == ""


def test_a_silent_cluster_that_alone_holds_a_push_is_named() -> None:
    rig = Rig()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    rig.push(home, 2)
    rig.feed(fx.StreamClosed(1))
    rig.feed(fx.Heard(3, say.FollowerHello("f", "another", 1, (), NO_VERSION)))  # it has nothing of that any more
    for _ in range(20):
        rig.now += 0.5
        rig.feed(fx.TimePassed())
    assert rig.shown["phase"] == "training"
    assert "home~1 was not heard for 10.0 s, and alone holds a push that a follower may need" in rig.shown["reason"]
    assert "until 500 s" in rig.shown["reason"]


def test_a_follower_that_computes_other_bits_is_named() -> None:
    rig = Rig()
    rig.push(rig.comes("home", 2), 1)
    newest = rig.machine.chain.newest
    assert _follower(rig.shown["followers"][0])["bits"] == ""
    rig.feed(fx.Heard(1, say.Applied("f", newest, differs=newest)))
    assert rig.shown["followers"][0]["bits_differ"] == str(newest)
    assert _follower(rig.shown["followers"][0])["bits"] == "differ from v1 on"


def test_parameters_that_are_not_finite_found_no_job() -> None:
    rig = Rig()
    bad = rig.comes("bad", 2)
    rig.push(bad, 1, finite=False)
    rig.feed(fx.TimePassed())
    assert not rig.machine.chain.founded
    assert "not finite" in rig.machine.chain.over(bad)
    assert not rig.dismissed[2].again
    rig.push(rig.comes("good", 2), 1)
    assert rig.machine.chain.founded


def test_a_push_that_is_refused_again_and_again_is_told_once() -> None:
    rig = Rig()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    for _ in range(3):
        rig.feed(fx.Heard(2, say.Offered(Offer(PushId(home, 7), rig.machine.chain.newest, "m", 8, 1))))
    assert [fields["push"] for name, fields in rig.notes if name == "push_refused"] == ["home~1/7"]


def test_a_push_that_is_refused_at_the_door_is_shown_until_one_is_taken() -> None:
    """Former bug: a refused offer of a push showed in the leader's log only, while its cluster repeated it for ever;
    now the status shows it.
    """
    rig = Rig()
    home = rig.comes("home", 2)
    rig.push(home, 1)
    newest = rig.machine.chain.newest
    rig.feed(fx.Heard(2, say.Offered(Offer(PushId(home, 1), newest, "other bytes", 8, 1))))
    assert rig.shown["clusters"][0]["refused"] == "push 1: other bytes under a number that is answered"
    rig.feed(fx.Heard(2, say.Offered(Offer(PushId(home, 7), newest, "m", 8, 1))))
    (row,) = rig.shown["clusters"]
    assert _cluster(row, {})["refused"] == row["refused"] == f"push 7: number 2 is next, base {newest}"
    rig.push(home, 2)
    assert rig.shown["clusters"][0]["refused"] == ""


def test_what_is_set_aside_is_an_event() -> None:
    rig = Rig(length=64)
    rig.push(rig.comes("home", 2), 1)
    newest = rig.machine.chain.newest
    for conn in range(3, 6):
        rig.feed(fx.Heard(conn, say.Beat(rig.comes(f"c{conn}", conn), 1.0, 1.0, newest, 0, 0, False)))
    leases, covers = rig.machine.chain.leases, rig.granted[3]
    assert leases is not None
    for conn in (4, 5):  # two were rejected before
        before = next(who for who, cluster in rig.machine.clusters.items() if cluster.conn == conn)
        leases._blame(0, covers[0].spans, before)
    who = next(who for who, cluster in rig.machine.clusters.items() if cluster.conn == 3)
    rig.push(who, 1, finite=False, covers=covers)
    said = [fields for name, fields in rig.notes if name == "set_aside"]
    assert [problems(name, fields) for name, fields in rig.notes if name == "set_aside"] == [[]]
    assert said[0]["spans"] == covers[0].spans
    assert "are set aside" in said[0]["reason"]
    assert rig.shown["leases"]["aside"] == [said[0]["reason"]]
