"""Checkers of a run's history accept random histories that obey the rules, and find each broken rule."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.observe import history
from chaos_lightning.observe.history import Commit, JobRun

GENESIS = "g"


@dataclasses.dataclass
class Made:
    """Made-up history: commits, views, and the members that are gone."""

    commits: list[Commit]
    views: dict[tuple[int, int], tuple[str, ...]]
    gone: set[str]
    entries: dict[str, str]


def make(seed: int, slots: int = 40) -> Made:
    """Returns a random history with joins, deaths, frozen members that miss their last slot, and headers that were
    given up.
    """
    rng = random.Random(seed)
    members = [f"m{i}" for i in range(rng.randint(1, 4))]
    made = Made([], {(1, 1): tuple(members)}, set(), {})
    view, prev, step, used, fresh, now = (1, 1), GENESIS, 0, 0, len(members), 0.0
    for seq in range(1, slots + 1):
        now += 1.0
        kind = rng.choice(["step"] * 4 + ["gather"])
        step += kind == "step"
        takes: dict[str, tuple[tuple[int, int], ...]] = {}
        if kind == "step":
            for member in members:
                take = rng.randint(0, 3)
                takes[member] = ((used, used + take),) if take else ()
                used += take

        at = (seq, step, kind, now)
        header = f"h{seq}"
        dead = rng.choice(members) if len(members) > 1 and rng.random() < 0.15 else ""
        survivors = [m for m in members if m != dead]
        if dead:
            made.gone.add(dead)
            if rng.random() < 0.5:  # the dead root knew a header that nobody else got; the slot is redone
                made.commits.append(_commit(at, dead, f"{header}-lost", prev, view, members, takes, used))
                members = survivors
                view = (1, view[1] + 1)
                made.views[view] = tuple(members)
                used = max((s[-1][1] for m, s in takes.items() if m in members and s), default=used)
                used = _reassign(takes, members, used)
                made.commits += [_commit(at, m, header, prev, view, members, takes, used) for m in members]
                prev = header
                continue
        made.commits += [_commit(at, m, header, prev, view, members, takes, used) for m in survivors]
        prev = header
        if dead:
            members = survivors
            view = (1, view[1] + 1)
            made.views[view] = tuple(members)
        elif rng.random() < 0.15:
            members = [*members, f"m{fresh}"]
            made.entries[members[-1]] = header
            fresh += 1
            view = (1, view[1] + 1)
            made.views[view] = tuple(members)
    return made


def _commit(
    at: tuple[int, int, str, float],
    member: str,
    header: str,
    prev: str,
    view: tuple[int, int],
    members: list[str],
    takes: dict[str, tuple[tuple[int, int], ...]],
    used: int,
) -> Commit:
    seq, step, kind, now = at
    own = {("", 0): takes[member]} if takes.get(member) else {}
    ledger = {("", 0): ((0, used),)} if used else {}
    return Commit(member, seq, step, kind, header, prev, view, tuple(members), own, ledger, now)


def _reassign(takes: dict[str, tuple[tuple[int, int], ...]], members: list[str], used: int) -> int:
    """Closes the gaps that dead members leave in a slot's positions: survivors keep their gradients, and later
    positions move up.
    """
    kept = {m: takes[m] for m in members if takes.get(m)}
    takes.clear()
    start = min((s[0][0] for s in kept.values()), default=used)
    for member, spans in kept.items():
        length = spans[0][1] - spans[0][0]
        takes[member] = ((start, start + length),)
        start += length
    return start if kept else used


def problems(made: Made) -> list[str]:
    (run,) = history.runs(made.commits)
    found = [
        *history.check_chain(run, genesis=GENESIS),
        *history.check_forks(run),
        *history.check_members(run, made.entries),
        *history.check_contributors(run, made.views),
        *history.check_commits_of_all(run, made.gone),
        *history.check_samples(run)[1],
    ]
    return [str(p) for p in found]


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_histories_that_obey_are_acquitted(seed: int) -> None:
    made = make(seed)
    if any("lost" in c.header for c in made.commits):
        # A redo may leave a hole where the dead one's samples were; only the use of samples is compared then.
        assert [p for p in problems(made) if not p.startswith("ledger")] == []
    else:
        assert problems(made) == []


def vanish(made: Made) -> None:
    """Removes all traces of member b after slot 11: it contributes to that slot, never commits it, and is missing in
    slot 12's view without a reason.
    """
    made.views[1, 2] = ("a",)
    last = replace(made.commits[22], view=(1, 2), contributors=("a",), ledger={("", 0): ((0, 46),)})
    made.commits[20:] = [made.commits[20], last]


def change(made: Made, place: int, **fields: object) -> None:
    made.commits[place] = replace(made.commits[place], **fields)  # type: ignore[arg-type]


def steady(seed: int = 3) -> Made:
    """Returns a history without deaths and joins: two members, twelve slots."""
    made = Made([], {(1, 1): ("a", "b")}, set(), {})
    used = 0
    for seq in range(1, 13):
        before, used = used, used + 4
        for i, member in enumerate(("a", "b")):
            made.commits.append(
                Commit(
                    member, seq, seq, "step", f"h{seq}", f"h{seq - 1}" if seq > 1 else GENESIS, (1, 1), ("a", "b"),
                    {("", 0): ((before + 2 * i, before + 2 * i + 2),)}, {("", 0): ((0, used),)}, float(seq),
                )
            )  # fmt: skip
    assert problems(made) == []
    return made


BREAKS: list[tuple[str, str, Callable[[Made], None]]] = [
    ("another predecessor", "order", lambda m: change(m, 10, prev="h2")),
    ("a slot number that jumps", "order", lambda m: [change(m, i, seq=9) for i in (10, 11)]),  # type: ignore[list-item, return-value]
    ("a step that stands still", "order", lambda m: [change(m, i, step=5) for i in (10, 11)]),  # type: ignore[list-item, return-value]
    ("a view that falls back", "order", lambda m: [change(m, i, view=(1, 0)) for i in (10, 11)]),  # type: ignore[list-item, return-value]
    ("a second header", "fork", lambda m: change(m, 11, header="x")),
    ("a different story about a header", "fork", lambda m: change(m, 11, contributors=("a", "b", "c"))),
    ("a contributor who is no member", "contributors", lambda m: m.views.update({(1, 1): ("a", "b", "c")})),
    ("an outsider's commit", "outsider", lambda m: change(m, 23, member="z")),
    ("a repeat", "repeat", lambda m: m.commits.append(m.commits[-1])),
    ("a regress", "regress", lambda m: m.commits.append(m.commits[-3])),
    ("a skipped slot", "skip", lambda m: m.commits.pop(11)),  # type: ignore[arg-type, return-value]
    ("a vanished survivor", "missing", vanish),
    ("a double use", "twice", lambda m: change(m, 11, used=m.commits[10].used)),
    ("a use from before", "twice", lambda m: change(m, 11, used=m.commits[1].used)),
    ("a use that is not spent", "ledger", lambda m: change(m, 23, used={("", 0): ((90, 92),)})),
    ("a ledger that forgets", "ledger", lambda m: [change(m, i, ledger={("", 0): ((4, 24),)}) for i in (10, 11)]),  # type: ignore[list-item, return-value]
]


@pytest.mark.parametrize(("what", "rule", "break_it"), BREAKS, ids=[b[0] for b in BREAKS])
def test_each_broken_rule_is_found(what: str, rule: str, break_it: Callable[[Made], None]) -> None:
    made = copy.deepcopy(steady())
    break_it(made)
    found = problems(made)
    assert any(p.startswith(rule) for p in found), found


def test_a_vanished_survivor_is_excused_if_it_was_hurt() -> None:
    made = steady()
    vanish(made)
    made.gone.add("b")
    assert problems(made) == []
    made = steady()
    made.commits.pop(21)
    made.gone.add("b")  # it contributed to slot 12: a death excuses one slot, its last
    assert [p for p in problems(made) if p.startswith("skip")]
    made = steady()
    made.commits.pop(23)
    assert problems(made) == []  # the last slot may still be on its way


def test_runs_that_do_not_overlap_are_several() -> None:
    first, second = steady().commits, [replace(c, t=c.t + 100, header="n" + c.header) for c in steady().commits]
    second = [replace(c, prev=c.prev if c.prev == GENESIS else "n" + c.prev) for c in second]
    assert [len(run.chain) for run in history.runs(first + second)] == [12, 12]
    rivals = [replace(c, t=c.t - 100) for c in second]
    (both,) = history.runs(sorted(first + rivals, key=lambda c: c.t))
    assert any(p.rule == "fork" for p in history.check_forks(both))


def test_circular_headers_end() -> None:
    made = steady()
    change(made, 0, prev="h12")
    change(made, 1, prev="h12")
    runs: list[JobRun] = history.runs(made.commits)
    assert any(list(history.check_chain(run)) for run in runs)


def test_epochs_have_no_holes() -> None:
    usage = {
        ("", 0): history.Usage(used=((0, 5), (7, 10)), count=8),
        ("", 1): history.Usage(used=((0, 2),), count=2),
        ("own", 0): history.Usage(used=((0, 3),), count=3),
    }
    (hole,) = history.check_complete(usage, {})
    assert "epoch 0 of stream '' ended without positions [5, 7) of 10" in str(hole)
    assert "[5, 7), [10, 12) of 12" in str(next(history.check_complete(usage, {("", 0): 12})))


def test_hashes_are_compared_per_header() -> None:
    compared, found = history.check_hashes([("h1", "a", "x"), ("h1", "b", "x"), ("h2", "a", "y")])
    assert (compared, found) == (1, [])
    compared, found = history.check_hashes([("h1", "a", "x"), ("h1", "b", "z"), ("h1", "a", "w")])
    assert compared == 1
    assert len(found) == 2
