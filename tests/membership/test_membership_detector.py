"""Tests which members count as dead, and which are waited for, look after look of the death detector (protocol.md 12,
12a).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from membership_script import member

from chaos_lightning.membership.detector import Death, Detector, Findings
from chaos_lightning.membership.peers import Peer, Standing
from chaos_lightning.membership.scene import Scene
from chaos_lightning.protocol.pace import Pacing
from chaos_lightning.protocol.types import WHOLE, Member, Settings, Verdict, ViewId

SETTINGS = Settings(
    heartbeat_timeout_s=0.3,
    confirm_timeout_s=0.1,
    hang_timeout_s=5.0,
    last_holder_timeout_s=50.0,
    reconnect_grace_s=2.0,
)
END = "closed (end of stream)"


class Look:
    """Death detector with members (all but `empty` hold the state) and newcomers, all of which speak all the time until
    they fall silent.
    """

    def __init__(
        self, members: str, newcomers: str = "", *, empty: str = "", hosts: dict[str, str] | None = None
    ) -> None:
        self.detector = Detector(SETTINGS, Pacing(SETTINGS))
        self.peers: dict[str, Peer] = {}
        for number, name in enumerate(members + newcomers, 1):
            who = member(f"{name}~{number}")
            host = (hosts or {}).get(name, who.host)
            standing = Standing.MEMBER if name in members else Standing.READY
            held = WHOLE if name in members and name not in empty else ()
            peer = Peer(
                Member(who.id, name, host, who.address, who.port), standing, conn=number, known=True, parts=held
            )
            peer.entered = ViewId(1, 1)
            self.peers[name] = peer
        self.silent: set[str] = set()
        self.now = 0.0
        self.near = ""
        """Names of the neighbours of each, where that is not everybody."""

    def fall_silent(self, *names: str) -> None:
        self.silent |= set(names)

    def close(self, name: str) -> None:
        self.peers[name].conn, self.peers[name].closed_at = None, self.now

    def at(self, now: float) -> Findings:
        self.now = now
        for name, peer in self.peers.items():
            if peer.conn is not None and name not in self.silent:
                self.detector.spoke(now, peer)
                peer.heard = now
                self.detector.heard(peer.id)
        of = {s: {p.id: p for p in self.peers.values() if p.standing is s and p.alive} for s in Standing}
        watched = of[Standing.MEMBER]
        holders = {i: p.parts if p.known else WHOLE for i, p in watched.items()}
        scene = Scene(watched, of[Standing.READY], holders, self.neighbours)
        findings = self.detector.judge(now, scene)
        for death in findings.deaths:
            self.of(death).dead = death.evidence
        return findings

    def neighbours(self, member_id: str) -> list[str]:
        return [self.peers[n].id for n in self.near if self.peers[n].conn is not None]

    def of(self, death: Death) -> Peer:
        return next(p for p in self.peers.values() if p.id == death.member)

    def say(self, by: str, about: str, *, alive: bool = False, certain: bool = False, seen: bool | None = None) -> None:
        seen = certain if seen is None else seen
        self.detector.verdict(self.peers[by].id, Verdict(self.peers[about].id, alive, "asked", certain, seen))

    def run(self, *times: float) -> list[Death]:
        return [death for now in times for death in self.at(now).deaths]


def names(pairs: Iterable[tuple[str, str]]) -> set[str]:
    return {by.partition("~")[0] for by, _ in pairs}


def everyone_denies(look: Look, about: str) -> None:
    for peer in look.peers:
        if peer != about:
            look.say(peer, about)


def test_denied_member_dies_while_another_holds_the_state() -> None:
    look = Look("ab")
    look.fall_silent("b")
    assert names(look.at(0.4).probes) == {"a"}
    look.say("a", "b", seen=True)
    assert [(d.member, d.proven) for d in look.run(0.6)] == [("b~2", False)]


def dies_of_silence(look: Look, name: str, since: float, times: tuple[float, ...]) -> float | None:
    """Returns the seconds of silence after which member `name` was taken for dead without other evidence; None if it
    was not.
    """
    look.fall_silent(name)
    for silence in times:
        if look.run(since + silence):
            return silence
        everyone_denies(look, name)
    return None


LONG = tuple(0.1 * n for n in range(4, 200))


def test_silence_alone_is_a_death_only_after_a_time_in_which_no_process_is_busy() -> None:
    """Without other evidence a silent member is taken for dead only after silence_timeout_s: a living process may hold
    the interpreter's lock that long.
    """
    look = Look("ab")
    look.run(0.0)
    assert dies_of_silence(look, "b", 0.0, LONG) == pytest.approx(SETTINGS.silence_timeout_s + 0.1)


@pytest.mark.parametrize("trouble", ["its stream broke", "its link broke"])
def test_one_broken_connection_makes_silence_no_death(trouble: str) -> None:
    look = Look("ab")
    look.run(0.0)
    if trouble == "its stream broke":
        look.close("b")
    else:
        look.peers["a"].down["b~2"] = END
    assert dies_of_silence(look, "b", 0.0, LONG) == pytest.approx(SETTINGS.silence_timeout_s + 0.1)


def test_patience_grows_with_the_silences_that_a_process_has_broken_and_shrinks_again() -> None:
    look = Look("ab")
    look.run(0.0)
    assert dies_of_silence(look, "b", 0.0, LONG[:15]) is None
    look.silent.clear()
    look.run(1.9)
    assert dies_of_silence(look, "b", 1.9, LONG) == pytest.approx(2 * 1.9, abs=0.25)

    look = Look("ab")
    look.run(0.0)
    look.silent.add("b")
    look.run(1.9)
    look.silent.clear()
    look.run(1.95, 600.0)
    assert dies_of_silence(look, "b", 600.0, LONG) == pytest.approx(SETTINGS.silence_timeout_s + 0.1)


def test_who_was_put_out_for_a_silence_and_joins_again_gets_more_patience() -> None:
    look = Look("ab")
    look.run(0.0)
    assert dies_of_silence(look, "b", 0.0, LONG) is not None
    look.silent.clear()
    look.detector.silences.returned(2.2, look.peers["b"].member)
    look.peers["b"].dead = ""
    look.run(2.3)
    assert dies_of_silence(look, "b", 2.3, LONG) == pytest.approx(2 * 2.2, abs=0.25)


def test_nothing_is_learned_of_a_process_that_was_stopped() -> None:
    look = Look("abc")
    look.run(0.0)
    look.silent.add("b")
    look.run(0.4)
    look.say("a", "b", seen=True)
    look.say("c", "b", alive=True)
    look.run(1.7)
    look.silent.clear()
    look.run(1.8)
    assert look.detector.silences.patience_s(1.8, look.peers["b"].member) == SETTINGS.silence_timeout_s


def test_process_that_is_seen_to_run_is_no_death_until_it_hangs() -> None:
    look = Look("ab")
    look.run(0.0)
    look.fall_silent("b")
    for now in LONG[:45]:
        assert look.run(now) == []
        look.say("a", "b", alive=True, seen=True)
    assert [d.member for d in look.run(SETTINGS.hang_timeout_s + 0.1)] == ["b~2"]


@pytest.mark.parametrize("other", ["nobody", "a joiner that is still loading", "a member that has not come back"])
def test_last_holder_outlives_denials_and_the_hang_timeout(other: str) -> None:
    look = Look("ab" if other != "nobody" else "a", "n", empty="b" if "joiner" in other else "")
    if "come back" in other:
        look.peers["b"].known = False
    look.fall_silent("a")
    look.run(0.4)
    everyone_denies(look, "a")
    assert look.run(0.6, 6.0, 49.0) == []
    (held,) = look.at(49.5).held
    assert (held.member, round(held.left_s, 1)) == ("a~1", 0.5)
    (death,) = look.run(50.5)
    assert death.proven
    assert "last_holder_timeout_s=50" in death.evidence


@pytest.mark.parametrize(("left", "dies"), [("d", True), ("cde", True), ("bcde", False)])
def test_a_closed_stream_and_link_are_no_death_while_nearly_all_have_left_a_silent_scheduler(
    left: str, dies: bool
) -> None:
    """While most members have left a silent scheduler and are coming back, a closed stream and a closed link are no
    proof of a death.
    """
    look = Look("abcde")
    for name in left:
        look.close(name)
    look.peers["a"].down["d~4"] = END
    assert [d.member for d in look.run(0.1)] == (["d~4"] if dies else [])
    look.say("a", "d", alive=True)
    assert look.run(0.3, 0.6) == []
    for name in left.replace("d", ""):
        look.peers[name].conn = 9
    assert look.run(0.7) == [], "nearly all are back: it left together with them, and is on its way as well"
    look.say("b", "d")
    look.say("a", "d")
    assert [d.member for d in look.run(0.75)] == ([] if dies else ["d~4"])


def test_a_scheduler_that_wakes_up_learns_one_by_one_who_has_left_it() -> None:
    look = Look("abcd")
    look.run(0.1)
    look.detector.shift(2.0, 1.9)
    look.peers["a"].down["d~4"] = END
    look.close("d")
    assert look.run(2.0) == [], "the others' streams are closed as well, and it does not know that yet"
    for name in "bc":
        look.close(name)
    look.say("a", "d", alive=True)
    assert look.run(2.1, 2.5, 3.5) == [], "it was suspected in that time"
    for name in "bcd":
        look.peers[name].conn = 9
    assert look.run(4.0) == []
    look.close("d")
    assert [d.member for d in look.run(4.1)] == ["d~4"]


def test_joiner_without_the_state_is_no_last_holder() -> None:
    look = Look("ab", empty="b")
    look.fall_silent("b")
    look.run(0.4)
    look.say("a", "b", seen=True)
    assert [d.member for d in look.run(0.6)] == ["b~2"]


def test_process_table_needs_no_time() -> None:
    """A process table proves a death at once, even if another witness still heard the member."""
    look = Look("a", "nm", hosts={"n": "host-a"})
    look.close("a")
    assert names(look.at(1.0).probes) == {"n", "m"}
    look.say("m", "a", alive=True)
    look.say("n", "a", certain=True)
    (death,) = look.run(1.0)
    assert death.proven


def test_newcomers_are_asked_only_if_no_member_can_be() -> None:
    look = Look("abc", "n")
    look.fall_silent("c")
    assert names(look.at(0.4).probes) == {"a", "b"}
    look.close("a")
    look.close("b")
    assert names(p for p in look.at(0.8).probes if p[1] == "c~3") == {"n"}


def test_who_shares_the_last_holders_machine_is_asked_first() -> None:
    look = Look("abc", "xyz", empty="bc", hosts={"z": "host-a"})
    look.fall_silent("a")
    assert look.at(0.4).probes[0] == ("z~6", "a~1")


def test_newcomer_that_comes_later_is_asked_at_once() -> None:
    look = Look("a", "n")
    look.peers["n"].conn = None
    look.close("a")
    findings = look.at(1.0)
    assert (findings.probes, findings.looks) == ((), ("a~1",))
    assert look.at(1.05) == Findings(), "nobody to ask, and the machine has just looked itself"
    look.peers["n"].conn = 2
    assert names(look.at(1.1).probes) == {"n"}


def test_two_silent_holders_never_die_of_the_same_silence() -> None:
    look = Look("ab", "n")
    look.fall_silent("a", "b")
    look.run(0.4)
    everyone_denies(look, "a")
    everyone_denies(look, "b")
    findings = look.at(6.0)
    assert (findings.deaths, [h.member for h in findings.held]) == ((), ["a~1", "b~2"])
    look.silent.discard("b")
    assert [(d.member, d.proven) for d in look.run(6.1)] == [("a~1", False)]
    look.fall_silent("b")
    look.run(6.6)
    everyone_denies(look, "b")
    assert look.run(6.8, 20.0) == [], "now b is the last one"


def test_holder_that_fell_silent_unseen_does_not_let_the_other_die() -> None:
    """Both holders of the state have been silent for too long at one look of the detector: neither is taken for dead,
    since each may be the last holder.
    """
    look = Look("ab", "n")
    look.at(0.0)
    look.fall_silent("a", "b")
    assert look.run(9.0) == []


def test_closed_connections_are_proof_once_there_was_time_to_come_back() -> None:
    look = Look("a", "n")
    look.close("a")
    look.peers["n"].down["a~1"] = END
    assert look.run(0.0, 1.0, 1.9) == []
    (death,) = look.run(2.1)
    assert death.proven
    assert "end of stream" in death.evidence


def test_connections_that_timed_out_are_no_proof() -> None:
    """Connections of a last holder that timed out prove no death: its machine may only have been cut off."""
    look = Look("a", "n")
    look.close("a")
    look.peers["n"].down["a~1"] = "closed (Connection timed out)"
    assert look.run(0.0, 1.0, 4.0, 6.0, 30.0) == []


def test_closed_connections_are_death_at_once_while_others_hold_the_state() -> None:
    look = Look("abc")
    look.close("c")
    look.peers["a"].down["c~3"] = END
    assert [(d.member, d.proven) for d in look.run(0.0)] == [("c~3", False)]


def test_scheduler_that_slept_forgives_the_last_holder_too() -> None:
    look = Look("a", "n")
    look.close("a")
    look.peers["n"].down["a~1"] = END
    look.run(0.0, 1.0)
    look.detector.shift(look.now, 100.0)
    look.peers["a"].closed_at += 100.0
    assert look.run(101.5) == []
    assert look.run(102.5) != []


def test_last_holder_that_talks_but_owes_a_report_is_waited_for_no_longer() -> None:
    look = Look("a", "n")
    look.detector.suspect(1.0, "a~1", "no report for 1.2", overdue=True)
    look.run(1.0)
    look.say("n", "a", alive=True)
    assert look.run(1.3, 10.0, 40.0) == []
    assert [d.proven for d in look.run(52.0)] == [True]


def test_neighbours_are_asked_whoever_else_knows_of_a_link_and_others_once_they_are_gone() -> None:
    """The suspect's neighbours in the view are asked about it; other members with a link to it only when these are
    gone.
    """
    look = Look("abcdef")
    look.near = "de"
    look.peers["a"].up.add("f~6")
    look.peers["b"].up.add("f~6")
    look.fall_silent("f")
    assert names(look.at(0.4).probes) == {"d", "e"}
    look.close("d")
    assert "e" in names(look.at(0.8).probes)
    look.close("e")
    assert names(p for p in look.at(1.2).probes if p[1] == "f~6") == {"a", "b"}


def test_a_neighbour_under_suspicion_is_asked_before_those_whose_word_counts_for_nothing() -> None:
    look = Look("abcd")
    look.near = "c"
    look.fall_silent("c", "d")
    assert "c" in names(p for p in look.at(0.4).probes if p[1] == "d~4")
