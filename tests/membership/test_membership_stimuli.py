"""Tests that state machines log events in readable form, without the payload of slots (see membership/stimuli.py)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

from membership_script import contribution, member

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.slots import close_slot
from chaos_lightning.protocol.types import (
    GENESIS,
    MAX_PARTS,
    NO_VIEW,
    Contribution,
    Decide,
    Header,
    Hello,
    Report,
    Settings,
    View,
    ViewId,
    Welcome,
)

MIB = 1 << 20
SLOTS = 10
VIEW = View(ViewId(1, 1), NO_VIEW, (member("a~1"), member("b~2")))


def founded(me: str) -> MemberMachine:
    machine = MemberMachine()
    machine.on(0.0, fx.ControlIn(Welcome(member(me), 1, "founder", "hello", 0.1, 0.3)))
    machine.on(0.0, fx.ControlIn(Decide(VIEW, GENESIS)))
    return machine


def gathers(machine: MemberMachine, who: str) -> Contribution:
    return replace(contribution(VIEW, machine.header, "gather", who), payload=bytes(MIB))


def header_of(machine: MemberMachine) -> Header:
    return close_slot(view=VIEW, prev=machine.header, contributions={m: gathers(machine, m) for m in VIEW.ids()})


def test_a_member_keeps_no_payload_of_slots_that_are_over() -> None:
    """Members that commit several slots with 2 MiB of payload each keep only the last header's in memory."""
    root, other = founded("a~1"), founded("b~2")
    tracemalloc.start()
    try:
        for slot in range(1, SLOTS + 1):
            header = header_of(other)
            other.on(0.0, fx.Contribute(replace(gathers(other, "b~2"), view=NO_VIEW)))
            other.on(0.0, fx.PeerIn("a~1", header))
            root.on(0.0, fx.Contribute(replace(gathers(root, "a~1"), view=NO_VIEW)))
            root.on(0.0, fx.PeerIn("b~2", gathers(root, "b~2")))
            assert root.seq == other.seq == slot
        kept_nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_nbytes < 6 * MIB


def test_the_words_tell_which_slot_it_was_and_how_much_it_gathered() -> None:
    machine = founded("a~1")
    machine.on(1.0, fx.PeerIn("b~2", gathers(machine, "b~2")))
    (_, digest) = machine.stimulus_log[-1]
    assert "b~2: contribution of b~2 to slot 1 of view 1.1, gather" in str(digest)
    assert f"{MIB} bytes" in str(digest)
    machine.on(2.0, fx.PeerIn("b~2", header_of(machine)))
    assert f"header of slot 1 of view 1.1, gather '', step 0, on {GENESIS.hash}, {2 * MIB} bytes" in str(
        machine.stimulus_log[-1]
    )
    machine.on(3.0, fx.ControlIn(Decide(VIEW, header_of(machine), hand_on=True)))
    assert "decide 1.1 of a~1, b~2, hand on header of slot 2" in str(machine.stimulus_log[-1])


def test_a_scheduler_keeps_no_payload_of_reports() -> None:
    scheduler, machine = SchedulerMachine(Settings(), fx.Chain(1, ViewId(1, 0))), founded("a~1")
    tracemalloc.start()
    try:
        for slot in range(SLOTS):
            header = header_of(machine)
            report = Report(ViewId(1, slot + 2), VIEW.id, 0, GENESIS.hash, pending=header, last=header)
            scheduler.on(float(slot), fx.MessageIn(1, report))
        kept_nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_nbytes < 6 * MIB
    assert f"report for 1.{SLOTS + 1}, entered 1.1, at 0 ({GENESIS.hash})" in str(scheduler.stimulus_log[-1])


def test_of_a_report_with_many_parts_a_scheduler_remembers_a_few() -> None:
    scheduler = SchedulerMachine(Settings(), fx.Chain(1, ViewId(1, 0)))
    parts = tuple((part, part + 1) for part in range(0, MAX_PARTS, 2))
    scheduler.on(0.0, fx.MessageIn(1, Report(ViewId(1, 2), VIEW.id, 0, GENESIS.hash, parts)))
    (_, digest) = scheduler.stimulus_log[-1]
    assert "parts ((0, 1), (2, 3), " in str(digest)
    assert f" and {len(parts) - 8} more, raw=True" in str(digest)
    assert len(str(digest)) < 500


def test_of_what_a_hello_asks_of_pipelines_a_scheduler_remembers_the_size() -> None:
    scheduler = SchedulerMachine(Settings(), fx.Chain(1, ViewId(1, 0)))
    said = Hello("default", "a", "h", "127.0.0.1", 1, 1, 1, 1, 1, "0", (), pipelines="7" * MIB)
    scheduler.on(0.0, fx.MessageIn(1, said))
    (_, kept) = scheduler.stimulus_log[-1]
    assert kept == fx.MessageIn(1, replace(said, pipelines=f"({MIB} bytes)"))
