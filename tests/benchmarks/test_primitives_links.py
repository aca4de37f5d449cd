"""Tests Fig. 9 and Table I: links in virtual time, and the text that compares them with the paper."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")


from benchmarks.paper import links
from benchmarks.paper.figure import FigureResult, Scale
from benchmarks.paper.links import fig9, plot_fig9, plot_table1, simulated, table1
from benchmarks.primitives import events as primitives
from benchmarks.primitives.events import Outcome, Sample
from benchmarks.primitives.member import Work
from benchmarks.primitives.samples import Exposure
from chaos_lightning.membership.topology import connected


def exposure(total: float) -> Exposure:
    return Exposure(total, total, total, total, total, total, 0.03, 0.03, 5)


def outcome(beyond_s: float, count: int = 9) -> Outcome:
    samples = [Sample(exposure(0.002 + beyond_s + i * 1e-6), exposure(0.002), 0.05) for i in range(count)]
    return Outcome(samples, 4, 0.4, entries=[(0.4, 0.02)] * count)


class Fakes:
    """Stand-in for measurements of real members that returns given outcomes by number of members."""

    def __init__(self, by_size: dict[int, float]) -> None:
        self.by_size = by_size
        self.asked: list[tuple[str, int, str]] = []

    def links(self, size: int, work: Work, events: int, rng: random.Random) -> dict[str, Outcome]:
        self.asked.append(("links", size, work.join_by))
        return {kind: outcome(self.by_size[size]) for kind in ("connect-link", "disconnect-link")}

    def leaves(self, size: int, work: Work, events: int, rng: random.Random) -> dict[str, Outcome]:
        self.asked.append(("leaves", size, work.join_by))
        return {"scale-in": outcome(self.by_size[size])}


def faked(monkeypatch: pytest.MonkeyPatch, by_size: dict[int, float]) -> Fakes:
    made = Fakes(by_size)
    monkeypatch.setattr(primitives, "links", made.links)
    monkeypatch.setattr(primitives, "leaves", made.leaves)
    few = simulated(4, 1, 0)
    monkeypatch.setattr(links, "simulated", lambda size, changes, seed: few)
    return made


def test_steps_in_virtual_time_cost_what_their_messages_do() -> None:
    found = simulated(6, 2, 3)
    assert {k: len(v) for k, v in found.items()} == {"connect-link": 2, "disconnect-link": 2}
    for cost in (e for values in found.values() for e in values):
        assert links._STEP_S < cost.usual_before < links._STEP_S + 12 * links._MESSAGE_S
        messages = cost.total / links._MESSAGE_S
        assert messages == pytest.approx(round(messages), abs=1e-6), "nothing but messages takes time"
        assert cost.total < links._STEP_S, "nobody waits for a step"


def test_clusters_grow_connected_and_never_with_every_link() -> None:
    for size in range(3, 13):
        for seed in range(5):
            made = links.grown(size, random.Random(seed))
            assert connected([f"w{i}" for i in range(size)], made)
            assert len(made) < size * (size - 1) // 2


def test_a_run_in_virtual_time_is_a_function_of_its_seed() -> None:
    assert simulated(4, 2, 1) == simulated(4, 2, 1)


def test_a_delay_in_virtual_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.membership import effects as fx
    from lab.simulate.node import Node

    usual = Node._apply

    def late(self: Node, effect: fx.MemberEffect, phase: object) -> None:
        if isinstance(effect, fx.Committed) and effect.header.view_change is not None and self.name == "w1":
            self.kernel.after(0.004, lambda: usual(self, effect, phase))  # type: ignore[arg-type]
        else:
            usual(self, effect, phase)  # type: ignore[arg-type]

    monkeypatch.setattr(Node, "_apply", late)
    found = simulated(4, 1, 2)
    assert min(e.total for values in found.values() for e in values) > 0.003


def test_delays_below_the_paper_s_at_all_sizes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    made = faked(monkeypatch, dict.fromkeys(range(3, 7), 0.0004))
    result = fig9(Scale.full())
    assert [size for _, size, _ in made.asked] == [3, 4, 5, 6]
    assert [c.agrees for c in result.claims] == [True, True, True, True]
    assert "0.40 ms (3)" in result.claims[0].ours
    assert result.data["real"]["6"]["beyond_p50_s"] == pytest.approx(0.000404)


def test_a_delay_that_grows_disagrees_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, {3: 0.0001, 4: 0.0004, 5: 0.0009, 6: 0.0016})
    result = fig9(Scale.full())
    assert [c.agrees for c in result.claims][:2] == [False, False]
    assert all("95 % intervals" in c.why for c in result.claims[:2])


def test_the_figure_is_drawn_from_what_a_file_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faked(monkeypatch, dict.fromkeys(range(3, 7), 0.0004))
    result = FigureResult.from_json(json.loads(json.dumps(fig9(Scale.small()).as_json())))
    plot_fig9(result, tmp_path / "fig9.png")
    assert (tmp_path / "fig9.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_every_primitive_with_its_claim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = faked(monkeypatch, dict.fromkeys(range(3, 7), 0.0012))
    result = table1(Scale.full())
    assert [how for what, _, how in made.asked if what == "leaves"] == ["replay", "pause"]
    assert set(result.data["rows"]) == set(result.data["affected"]) == set(result.data["paper"])
    assert len(result.claims) == 5
    assert [c.agrees for c in result.claims] == [True, True, False, False, False]
    assert result.data["rows"]["scale-in"]["count"] == 18, "departures before either kind of return"
    again = FigureResult.from_json(json.loads(json.dumps(result.as_json())))
    plot_table1(again, tmp_path / "table1.png")
    assert (tmp_path / "table1.png").read_bytes().startswith(b"\x89PNG")
