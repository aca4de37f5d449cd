"""Tests `chaos-lightning link add|remove`, the calls behind it, and the links that `status` shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from served import PATIENCE_S, Client, Served, serving
from typer.testing import CliRunner, Result
from until_support import until

from chaos_lightning.cli import app
from chaos_lightning.control.requests import change_link, fetch_status
from chaos_lightning.control.scheduler_server import real_machine
from chaos_lightning.errors import RefusedError, SchedulerUnreachableError
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import (
    Decide,
    Entered,
    FromMember,
    LinkEvent,
    LinkReport,
    NextView,
    OpenLinks,
    Ready,
    Settings,
    ToMember,
)

SETTINGS = Settings(min_nodes=3, heartbeat_timeout_s=5.0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def answers(message: ToMember) -> list[FromMember]:
    """Returns the answers of a member that reaches all others, and enters the first view."""
    match message:
        case OpenLinks(peers):
            return [*(LinkEvent(p.id, True, "connected") for p in peers), *([Ready()] if len(peers) == 2 else [])]
        case Decide(view, base):
            return [Entered(view.id, 0, 0, base.hash)]
        case _:
            return []


class Reaching(Client):
    """Member that answers from the scheduler's first message on, as `answers` says."""

    def _on_message(self, message: ToMember) -> None:
        self.answer = answers
        super()._on_message(message)


@contextmanager
def attending_reaching(endpoint: str, name: str) -> Iterator[Client]:
    client = Reaching(endpoint, name)
    try:
        yield client
    finally:
        client.close()
        client.agent.join(PATIENCE_S)


@contextmanager
def job() -> Iterator[tuple[Served, dict[str, Client]]]:
    """Yields a scheduler and three members that are in their first view and do not train."""
    with serving(machine=real_machine, settings=SETTINGS) as served, ExitStack() as stack:
        clients = {}
        for name in "abc":
            clients[name] = stack.enter_context(attending_reaching(served.endpoint, name))
        for client in clients.values():
            client.messages.wait_for(Decide)
        until(lambda: fetch_status(served.endpoint)["machine"]["settled"], "a view in which both stand")
        yield served, clients


def test_link_is_removed_and_added_by_the_command() -> None:
    with job() as (served, clients):
        result = run("link", "remove", "a", "b", "--endpoint", served.endpoint)
        assert result.exit_code == 0, result.output
        assert "stays away until it is added again" in result.output
        change = clients["c"].messages.wait_for(NextView).view
        assert len(change.links) == 2
        assert {"a", "b"} not in [{link.a[0], link.b[0]} for link in change.links]
        result = run("link", "add", "b", "a", "--endpoint", served.endpoint)
        assert "told to connect" in result.output


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (("a", "a"), "a link has two ends"),
        (("a", "nobody"), "'nobody' is no member; present: "),
        (("b", "c"), "without the link of b~"),
    ],
)
def test_senseless_request_is_an_error_that_says_why(ends: tuple[str, str], words: str) -> None:
    with job() as (served, _):
        change_link(served.endpoint, "a", "b", add=False)
        with pytest.raises(RefusedError, match=words):
            change_link(served.endpoint, *ends, add=False)


def test_status_shows_links_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with job() as (served, clients):
        peer = next(m["id"] for m in fetch_status(served.endpoint)["machine"]["members"] if m["id"].startswith("b~"))
        clients["a"].agent.send(LinkReport(peer, 0.004, 3e8, "probe"))
        until(lambda: "300" in run("status", "--endpoint", served.endpoint).output, "what was measured")
        text = run("status", "--endpoint", served.endpoint).output
        assert "plan: rotating; as configured" in text
        assert "in use" in text
        facts = json.loads(run("status", "--endpoint", served.endpoint, "--json").output)["machine"]
        assert {row["state"] for row in facts["links"]} == {"in use"}
        assert [row["latency_s"] for row in facts["links"] if row["there_bps"]] == [0.004]


def test_machine_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaos_lightning.control.scheduler_effects._ANSWER_TIMEOUT_S", 0.05)
    with serving() as served, pytest.raises(RefusedError, match="did not get to it within"):
        change_link(served.endpoint, "a", "b", add=True)


def test_answer_goes_to_whom_asked() -> None:
    """Each caller gets the answer with its own request's token, not an answer to another request."""

    def rule(event: fx.SchedulerEvent) -> list[fx.SchedulerEffect] | None:
        if isinstance(event, fx.ChangeLink):
            return [
                fx.Answer(event.token + 1, False, "another's"),
                fx.Answer(event.token, True, f"{event.a} {event.b}"),
            ]
        return None

    with serving(rule) as served:
        assert change_link(served.endpoint, "x", "y", add=True) == "x y"
        assert change_link(served.endpoint, "y", "z", add=False) == "y z"


def test_nobody_serves_the_endpoint() -> None:
    with pytest.raises(SchedulerUnreachableError):
        change_link("127.0.0.1:9", "a", "b", add=True, timeout_s=1.0)
    assert run("link", "sideways", "a", "b").exit_code == 2
