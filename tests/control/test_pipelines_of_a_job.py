"""Tests that a real scheduler plans pipelines for members that talk to it by gRPC, and plans anew when one dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from served import Client, hello, place_of, scheduler_process
from typer.testing import CliRunner
from until_support import until

from chaos_lightning import cli
from chaos_lightning.control.requests import fetch_status
from chaos_lightning.events.reader import log_files, read_events
from chaos_lightning.membership.parts import division
from chaos_lightning.observe.render import from_status
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.request import PipelineRequest
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Decide,
    Entered,
    Fence,
    FromMember,
    Header,
    Heartbeat,
    Kind,
    Notice,
    OpenLinks,
    Prepare,
    Probe,
    Ready,
    Report,
    Saved,
    Verdict,
    View,
)

WORKERS = 2
"""Number of members, which are of one node: so they found the job together."""


def asks(room: int, **more: Any) -> str:
    """Returns a member's request for pipelines: a model of four layers, on a device with memory for `room` of them."""
    layers = tuple(Layer(name=f"block.{i}", forward_s=1.0, backward_s=2.0, parameter_nbytes=10) for i in range(4))
    device = Device(name="me", memory_nbytes=10 * room)
    job = TrainingJob(layers=layers, devices=(device,), micro_batches=4)
    return PipelineRequest(**{"job": job, "policy": "adaptive", "copies": 1, **more}).to_json()


class Scripted:
    """Member without tensors: enters each view at once, and reports the layers that the view gives it."""

    def __init__(self, endpoint: str, name: str, pid: int, pipelines: str) -> None:
        self.view: View | None = None
        self.header: Header = GENESIS
        self._hello = hello(name, host=f"host-{name}", pid=pid, node="rack", workers=WORKERS, pipelines=pipelines)
        self._lock = threading.Lock()
        self.client = Client(endpoint, name, hello_factory=self._says, heartbeat=self._beat)
        self.client.answer = self._answer

    @property
    def id(self) -> str:
        return self.client.resume

    def _says(self) -> Any:
        stands = self.view.id if self.view is not None else NO_VIEW
        client = getattr(self, "client", None)  # its thread may ask before it is assigned
        return replace(self._hello, resume=client.resume if client is not None else "", view=stands)

    def _beat(self) -> Heartbeat:
        return Heartbeat(self.view.id if self.view is not None else NO_VIEW, self.header.seq, self.header.step)

    def _answer(self, message: object) -> list[FromMember]:
        match message:
            case OpenLinks():
                return [Ready()]
            case Decide(view):
                self.view = view
                return [self._stands(view)]
            case Prepare(number) if self.view is not None:
                held = division(self.view).owned(self.id)
                at = self.header
                return [Report(number, self.view.id, at.seq, at.hash, held, last=at, owns=held)]
            case Probe(suspect):
                return [Verdict(suspect, False, "closed")]
            case _:
                return []

    def _stands(self, view: View) -> Entered:
        at = self.header
        return Entered(view.id, at.seq, at.step, at.hash, division(view).owned(self.id), view.chain)

    def commits(self, header: Header) -> None:
        """Reports `header` as the member's newest commit, now and in later heartbeats."""
        self.header = header
        assert self.view is not None
        self.client.agent.send(self._stands(self.view))

    def decided(self, test: Callable[[View], bool]) -> View:
        found = self.client.messages.wait(lambda m: isinstance(m, Decide) and test(m.view))
        assert isinstance(found, Decide)
        return found.view

    def die(self) -> None:
        """Ends the member's stream without a goodbye, as SIGKILL does."""
        talk = self.client.agent._client.talk
        self.client.agent._client._stopping = True
        assert talk is not None
        talk.end()
        self.client.agent.join(10.0)


def found(endpoint: str, text: str) -> list[Scripted]:
    """Returns two members that have founded the job and committed a step."""
    members = [Scripted(endpoint, name, pid, text) for pid, name in enumerate("ab", 1)]
    view = members[0].decided(lambda v: len(v.members) == 2)
    for member in members:
        until(lambda m=member: m.view is not None, "the first view")  # type: ignore[misc]
    first = Header(1, Kind.STEP, 1, view.id, GENESIS.hash, view.id, reduced=True)
    for member in members:
        member.commits(first)
    return members


RULES = ("--store", ":memory:", "--set", "heartbeat_timeout_s=2")


def machine(endpoint: str) -> dict[str, Any]:
    facts: dict[str, Any] = fetch_status(endpoint)["machine"]
    return facts


def chosen(logs: Path) -> list[Mapping[str, Any]]:
    """Returns the decisions about pipelines that the scheduler's event log has."""
    return [r.fields for r in read_events(logs) if r.name == "pipelines"] if log_files(logs) else []


def test_a_death_is_answered_with_other_pipelines_and_a_better_plan_is_looked_for(tmp_path: Path) -> None:
    with scheduler_process(*RULES, "--log-dir", str(tmp_path)) as process:
        endpoint = place_of(process)
        early = [Scripted(endpoint, name, pid, asks(1)) for pid, name in enumerate("xy", 8)]
        notice = early[0].client.messages.wait(lambda m: isinstance(m, Notice) and "fit" in m.text)
        assert "a plan needs 4 members" in notice.text
        for member in early:
            member.die()
        until(lambda: not machine(endpoint)["others"], "that the first ones are forgotten")
        members = found(endpoint, asks(8, copies=2))
        try:
            view = members[0].view
            assert view is not None
            parts = division(view)
            assert parts.layer_count == 4
            assert all(parts.owned(m.id) for m in members)
            until(lambda: machine(endpoint)["settled"], "that all stand")
            assert {row["runs"] for row in machine(endpoint)["members"]} == {"layers 0-3"}
            shown = CliRunner().invoke(cli.app, ["status", "--endpoint", endpoint]).output
            assert "pipelines: 2 x 1 (pipelines x stages)" in shown
            assert shown.count("layers 0-3") == 2
            board = from_status(fetch_status(endpoint))
            assert ("pipelines", "2 x 1") in board.figures
            assert [row.remark for row in board.rows] == ["layers 0-3"] * 2
            until(lambda: len(chosen(tmp_path)) == 3, "the answer to the search")
            members[1].die()
            after = members[0].decided(lambda v: len(v.members) == 1)
            assert division(after).owned(members[0].id) == ((0, 5),)
            assert machine(endpoint)["pipelines"] == "2 x 1, 1 vacant"
            lack, first, searched, lost = chosen(tmp_path)
            assert (lack["view"], lack["least_members"]) == ("", 4)
            assert first["view"] == searched["view"] == str(view.id)
            assert lost["view"] == str(after.id)
            assert lost["candidates"][lost["chosen"]]["name"].endswith("reroute")
        finally:
            members[0].client.close()


def test_a_job_that_is_to_restart_ends_for_all_and_the_next_one_begins(tmp_path: Path) -> None:
    with scheduler_process(*RULES, "--log-dir", str(tmp_path)) as process:
        endpoint = place_of(process)
        members = found(endpoint, asks(8, copies=2, policy="restart"))
        try:
            members[0].client.agent.send(Saved(1, "/run/step1.ckpt"))
            until(lambda: machine(endpoint)["settled"], "that all stand")
            members[1].die()
            fence = members[0].client.messages.wait_for(Fence)
            assert (fence.over, fence.rejoin) == (True, False)
            assert fence.reason.endswith("the newest checkpoint is /run/step1.ckpt (step 1)")
        finally:
            members[0].client.close()
        again = found(endpoint, asks(8, copies=2, policy="restart"))
        for member in again:
            assert member.view is not None
            assert (member.view.predecessor, member.view.id.term) == (NO_VIEW, 2)
            member.client.close()
