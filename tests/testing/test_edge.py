"""Tests emulated networks: schedules are applied, pairs without a link are refused, and the choice of a backend has a
reason.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_relay import DEADLINE_S, Member, broken, there_and_back

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.events import EventLog, read_events
from chaos_lightning.machine.process_table import host_identity
from chaos_lightning.settings import EngineConfig
from chaos_lightning.testing.edge import namespaces
from chaos_lightning.testing.edge.network import Edge, choose_backend
from chaos_lightning.testing.edge.topology import Change, Condition, EdgeNode, Link, LinkState, Topology
from chaos_lightning.testing.emulation import HOST, RELAY, emulating

A_B = ("a", "b")
NODES = (EdgeNode("a"), EdgeNode("b"), EdgeNode("c", access_bps=500e6))
LINKS = (Link("a", "b", 300e6), Link("b", "c", 300e6))


def network(*schedule: Change) -> Topology:
    return Topology(NODES, LINKS, schedule)


@pytest.fixture
def members() -> Iterator[dict[str, Member]]:
    made = {name: Member(f"{name}-0") for name in "abc"}
    yield made
    for member in made.values():
        member.close()


def test_the_schedule_is_carried_out_told_and_logged(members: dict[str, Member], tmp_path: Path) -> None:
    told: queue.Queue[tuple[float, str]] = queue.Queue()
    topology = network(
        Change(at_s=0.02, links=(A_B,), share=0.5),
        Change(at_s=0.05, links=(A_B,), condition=Condition.CUT),
        Change(at_s=0.08, links=(A_B,), condition=Condition.WHOLE),
    )
    with EventLog.in_directory(tmp_path, "lab", role="harness") as log:
        edge = Edge(topology, "relay", told=lambda t_s, text: told.put((t_s, text)), events=log)
        with edge, emulating(relay=edge.environment("a")[RELAY]):
            mine, theirs = members["b"].call(members["a"])
            there_and_back(mine, theirs)
            assert edge.elapsed_s == 0.0
            assert edge.links()[A_B] == LinkState(300e6)
            edge.start()
            assert [told.get(timeout=DEADLINE_S) for _ in range(3)] == [
                (0.02, "a - b: 300 Mbps -> 150 Mbps"),
                (0.05, "a - b: cut"),
                (0.08, "a - b: restored"),
            ]
            assert edge.wait_until(0.08, DEADLINE_S)
            assert edge.elapsed_s > 0.0
            assert edge.links()[A_B] == LinkState(150e6)
            assert broken(mine)
            there_and_back(*members["b"].call(members["a"]))
    faults = [(r.get("kind"), r.get("peer"), r.get("rate_bps")) for r in read_events(tmp_path) if "kind" in r.fields]
    assert faults == [("rate", "b", 150e6), ("cut", "b", 150e6), ("restore", "b", 150e6)]


def test_what_is_cut_at_the_start_is_cut_before_anybody_comes(members: dict[str, Member]) -> None:
    network_cut = network(Change(links=(A_B,), condition=Condition.CUT))
    with Edge(network_cut, "relay") as edge, emulating(relay=edge.environment("a")[RELAY]):
        assert members["b"].refused_by(members["a"])
        assert members["c"].refused_by(members["a"])  # no link at all
        there_and_back(*members["c"].call(members["b"]))


def test_nodes_learn_the_products_own_settings() -> None:
    with Edge(network(), "relay") as edge:
        environment = edge.environment("b")
        assert edge.command("b", ["train", "x"]) == ["train", "x"]
    config = EngineConfig.build({}, {**environment, "LOCAL_RANK": "1"})
    assert config.name == "b-1"
    assert config.endpoint == edge.backend.endpoint
    assert not config.by_reference
    assert config.bind == "127.0.0.1"
    assert config.neighbour_names == ("a", "c")
    assert EngineConfig(neighbours=" a+b , c-0 ").neighbour_names == ("a", "b", "c-0")
    assert EngineConfig().neighbour_names == ()
    for wrong in ("a/b", "me"):
        with pytest.raises(ConfigurationError, match=f"neighbours='{wrong}'"):
            EngineConfig(neighbours=wrong, name="me")
    here = host_identity()
    with emulating(host=environment[HOST]):
        assert host_identity() == f"{here}@b"
    assert host_identity() == here


def test_a_schedule_that_never_began_ends_at_once_and_twice() -> None:
    edge = Edge(network(Change(at_s=1e9, share=0.5)), "relay")
    assert not edge.wait_until(0.0, 0.0)
    edge.close()
    edge.close()


def test_a_schedule_is_left_in_the_middle() -> None:
    edge = Edge(network(Change(at_s=1e9, share=0.5)), "relay")
    edge.start()
    edge.close()
    assert not edge._thread.is_alive()


def test_backends_are_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Topology(NODES, (Link("a", "b", 1, 0.1), Link("b", "c", 1)))

    def chosen(topology: Topology, ability: namespaces.Ability, wanted: str = "auto") -> tuple[str, str]:
        monkeypatch.setattr(namespaces, "ability", lambda: ability)
        choice = choose_backend(topology, wanted)
        return choice.backend, choice.reason

    no, plain, full = (
        namespaces.Ability(False, "it needs root"),
        namespaces.Ability(True),
        namespaces.Ability(True, delay=True),
    )
    assert chosen(network(), no) == ("relay", "namespaces cannot work here: it needs root")
    assert chosen(network(), plain)[0] == "namespaces"
    assert chosen(late, full)[0] == "namespaces"
    backend, reason = chosen(late, plain)
    assert backend == "relay"
    assert "no netem" in reason
    assert chosen(late, plain, "namespaces")[0] == "namespaces"
    assert chosen(network(), full, "relay")[0] == "relay"
    with pytest.raises(ConfigurationError, match="cannot work here: it needs root; use --backend relay"):
        chosen(network(), no, "namespaces")
    with pytest.raises(ConfigurationError, match="backend 'cable': expected one of auto, relay, namespaces"):
        chosen(network(), no, "cable")


def test_a_change_that_the_backend_refuses_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    topology = network(Change(at_s=0.01, links=(A_B,), share=0.5), Change(at_s=0.02, links=(A_B,), share=0.25))
    with Edge(topology, "relay", told=lambda t_s, text: told.put(text)) as edge:
        apply = edge.backend.apply

        def once(pair: tuple[str, str], state: LinkState) -> None:
            monkeypatch.setattr(edge.backend, "apply", apply)
            raise OSError("no")

        monkeypatch.setattr(edge.backend, "apply", once)
        edge.start()
        assert told.get(timeout=DEADLINE_S) == "a - b: 300 Mbps -> 150 Mbps FAILED: no"
        assert told.get(timeout=DEADLINE_S) == "a - b: 150 Mbps -> 75 Mbps"


def test_nothing_is_left_in_the_environment() -> None:
    assert os.environ.get(RELAY) is None
