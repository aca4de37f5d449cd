"""Tests how a step's attempts and other slots run while parts of the state move between members.

The training thread is this one; what the I/O thread says is posted before, or by what the loop calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.collectives.layout import Section
from chaos_lightning.errors import (
    AttemptOverError,
    ConfigurationError,
    DeadlineError,
    DepartedError,
    FencedError,
    StateError,
)
from chaos_lightning.events.events import EventLog
from chaos_lightning.member import part_moves
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.entrance import Entrance
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.part_moves import PartMoves, PartReader
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.unit_steps import Attempts, UnitsDone, await_commit
from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member_parts import MemberParts
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kept, Kind, Member, View, ViewId
from chaos_lightning.settings import EngineConfig

HEAD = replace(GENESIS, seq=3, step=3, view=ViewId(1, 1))
CLOSED = replace(HEAD, seq=4, step=4)
ME = "a~1"


def view_of(number: int, *rows: tuple[str, ...], layers: int = 4) -> View:
    """Returns a view with pipelines: each row names the members of one pipeline, whose stages have equal numbers of
    layers.
    """
    plan = tuple(
        Pipeline(
            tuple(PlanStage(m, i * layers // len(row), (i + 1) * layers // len(row)) for i, m in enumerate(row)), 1
        )
        for row in rows
    )
    members = tuple(Member(m, m[0], "host", "127.0.0.1", 1) for row in rows for m in row)
    return View(
        ViewId(1, number),
        ViewId(1, number - 1) if number > 1 else NO_VIEW,
        members,
        pipelines=ViewPipelines.of(PipelinePlan(layers, plan)).to_json(),
    )


FIRST, SECOND, THIRD = (view_of(n, (ME, "b~2")) for n in (1, 2, 3))
MISSING = ((2, 3),)


def as_it_is(commit: fx.Committed) -> Any:
    return commit


class Step:
    """Stand-in for `UnitStep` that records the names of its methods as they are called."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.did.append(name)


class Moves:
    """Stand-in for moves of parts that adds to a step's record; `pulled` decides how a pull ends."""

    def __init__(self, step: Step, mail: Mailbox, pulled: Callable[[], bool] | None = None) -> None:
        self.step, self.mail, self.pulled = step, mail, pulled

    def serve(self, header: Header, view: View) -> None:
        self.step.did.append(f"serve {view.id}")

    def pull(self, wanted: fx.PullParts, deadline: float) -> bool:
        self.step.did.append(f"pull {wanted.view.id}")
        if self.pulled is not None:
            return self.pulled()
        self.mail.post(parts=None)
        return True


def posted(**fields: object) -> Mailbox:
    mail = Mailbox("a", member=FIRST.members[0], view=FIRST)
    mail.post(**fields)
    return mail


def wanted(view: View = SECOND) -> fx.PullParts:
    return fx.PullParts(HEAD, view, MISSING)


def committed(mail: Mailbox, header: Header = CLOSED) -> None:
    mail.commit(fx.Committed(header, mail.view or FIRST, ()))


def run(step: Step, moves: Moves, mail: Mailbox, attempt: Callable[[View, int], UnitsDone]) -> fx.Committed:
    attempts = Attempts(cast(Any, step), moves, mail, HEAD, lambda *_: None, as_it_is, lambda: time.monotonic() + 5.0)
    return cast(fx.Committed, attempts.run(attempt))


def done(view: View, seq: int) -> UnitsDone:
    return UnitsDone(weight=1.0, presence=b"", micro_batches=(), coverage=())


def no_attempt(view: View, seq: int) -> UnitsDone:
    pytest.fail("no attempt is open")


def test_who_is_put_out_while_it_pulls_parts_is_told_so() -> None:
    mail, step = posted(parts=wanted()), Step()
    pulls = 0

    def pulled() -> bool:
        nonlocal pulls
        pulls += 1
        assert pulls < 3, "it pulls for ever"
        mail.post(ejected=("frozen", True))
        return False

    with pytest.raises(FencedError, match="frozen"):
        run(step, Moves(step, mail, pulled), mail, no_attempt)
    assert step.did[-1] == "drop"


def test_an_attempt_that_was_finished_is_dropped_before_parts_are_served_and_pulled() -> None:
    """A finished attempt that is superseded is undone before parts are served, since its forward passes changed
    buffers.
    """
    mail, step = posted(attempt=(FIRST, 4)), Step()

    def attempt(view: View, seq: int) -> UnitsDone:
        if view is FIRST:
            step.did.append("attempt")
            mail.post(parts=wanted(), attempt=(SECOND, 4))
        else:
            committed(mail)
        return done(view, seq)

    run(step, Moves(step, mail), mail, attempt)
    after = step.did[step.did.index("attempt") + 1 :]
    assert after[:4] == ["drop", f"serve {SECOND.id}", f"pull {SECOND.id}", "remember_base"]


def test_parts_move_while_a_slot_without_units_is_waited_for() -> None:
    mail, step = posted(parts=wanted(), attempt=(SECOND, 4)), Step()
    moves = Moves(step, mail)

    def serve(header: Header, view: View) -> None:
        step.did.append(f"serve {view.id}")
        if view is SECOND and mail.parts is None:
            mail.post(attempt=(THIRD, 4))
        elif view is THIRD:
            committed(mail)

    moves.serve = serve  # type: ignore[method-assign]
    commit = await_commit(moves, mail, HEAD, "a gather", time.monotonic() + 5.0)
    assert commit.header == CLOSED
    assert step.did == [f"serve {SECOND.id}", f"pull {SECOND.id}", f"serve {SECOND.id}", f"serve {THIRD.id}"]


def test_who_is_put_out_while_parts_move_for_another_slot_is_told_so() -> None:
    mail, step = posted(parts=wanted(), ejected=("frozen", True)), Step()

    def pulled() -> bool:
        assert step.did.count(f"pull {SECOND.id}") < 3, "it pulls for ever"
        return False  # what it is to pull stays as it is

    with pytest.raises(FencedError, match="frozen"):
        await_commit(Moves(step, mail, pulled), mail, HEAD, "a gather", time.monotonic() + 5.0)


GONE = replace(SECOND, members=SECOND.members[1:], leaving=SECOND.members[:1])
PARTED = replace(SECOND, members=(), leaving=SECOND.members)


def test_who_is_let_go_by_a_decision_serves_and_may_be_taken_back() -> None:
    """A member that a decision lets go serves its parts without running units, waits longer than a step's timeout, and
    runs units again when it is taken back.
    """
    mail, step = posted(attempt=(FIRST, 4)), Step()
    moves, tries = Moves(step, mail), 0

    def attempt(view: View, seq: int) -> UnitsDone:
        step.did.append(f"attempt {view.id}")
        if view is FIRST:
            mail.post(let_go=GONE)
            raise AttemptOverError("over")
        committed(mail)
        return done(view, seq)

    def deadline() -> float:
        nonlocal tries
        tries += 1
        if tries == 4:  # one wait for the first attempt, one for the view that lets it go, and two that end in vain
            mail.post(let_go=None, attempt=(THIRD, 4))
        return time.monotonic() + (5.0 if tries < 3 else 0.0)

    attempts = Attempts(cast(Any, step), moves, mail, HEAD, lambda *_: None, as_it_is, deadline)
    assert cast(fx.Committed, attempts.run(attempt)).header == CLOSED
    assert tries >= 4
    assert step.did == [
        "remember_base",
        f"serve {FIRST.id}",
        f"attempt {FIRST.id}",
        "drop",
        f"serve {GONE.id}",
        "drop",
        f"serve {THIRD.id}",
        f"attempt {THIRD.id}",
    ]


def test_who_is_let_go_by_a_decision_and_has_no_scheduler_waits_no_longer_than_for_a_step() -> None:
    mail, step = posted(let_go=GONE, lost="nobody answers"), Step()
    with pytest.raises(DeadlineError):
        await_commit(Moves(step, mail), mail, HEAD, "a gather", time.monotonic() + 0.05)
    assert step.did == [f"serve {GONE.id}"]


@pytest.mark.parametrize("units", [True, False])
def test_a_decision_that_lets_all_members_go_ends_the_slot(units: bool) -> None:
    mail, step = posted(attempt=(FIRST, 4), let_go=PARTED), Step()
    moves = Moves(step, mail)
    by_units = lambda: run(step, moves, mail, no_attempt)  # noqa: E731
    others = lambda: await_commit(moves, mail, HEAD, "a gather", time.monotonic() + 5.0)  # noqa: E731
    with pytest.raises(DepartedError, match="let go with all other members"):
        (by_units if units else others)()
    assert step.did == (["remember_base", f"serve {PARTED.id}", "drop"] if units else [f"serve {PARTED.id}"])


def test_parts_that_have_come_are_of_the_base_though_others_do_not_come() -> None:
    """If one part cannot be pulled, parts pulled before it are remembered as the base state first, so that undoing the
    attempt keeps them.
    """
    mail, step = posted(parts=wanted()), Step()

    def pulled() -> bool:
        raise StateError("nobody has the other one")

    with pytest.raises(StateError):
        run(step, Moves(step, mail, pulled), mail, no_attempt)
    assert step.did[-3:] == [f"pull {SECOND.id}", "remember_base", "drop"]


def test_whatever_ends_an_attempt_it_is_dropped() -> None:
    """An attempt that ends by any exception is undone, so that no file gets its changed buffers."""
    mail, step = posted(attempt=(FIRST, 4)), Step()

    def attempt(view: View, seq: int) -> UnitsDone:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(step, Moves(step, mail), mail, attempt)
    assert step.did[-1] == "drop"


def an_engine() -> Engine:
    return Engine(EngineConfig(endpoint="127.0.0.1:9", log_dir="none", step_timeout_s=5.0))


def test_an_engine_moves_parts_in_every_slot_and_serves_them_when_it_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    engine, step = an_engine(), Step()
    engine.prepare(sections=[Section("all", [("w", torch.nn.Parameter(torch.ones(4)))])])
    engine.header, mail = HEAD, engine._mail
    mail.post(parts=wanted(), view=SECOND, member=SECOND.members[0])
    moves = Moves(step, mail, lambda: committed(mail) is None)
    monkeypatch.setattr(moves, "committed", lambda _: None, raising=False)
    engine._moves = cast(Any, moves)
    monkeypatch.setattr(engine._loop, "call", lambda _: None)
    assert engine._slot(Kind.GATHER, name="x") == CLOSED
    assert step.did == [f"serve {SECOND.id}", f"pull {SECOND.id}"]
    engine.out, engine.header = True, replace(CLOSED, next_view=THIRD.id, view_change=THIRD)
    mail.post(left="let go")
    engine.wait_released(1.0)
    assert step.did[-1] == f"serve {THIRD.id}"
    engine.close()


def test_a_leaver_waits_for_its_release_as_long_as_a_scheduler_serves_it() -> None:
    """A leaving member, whose parts others may need, waits beyond its timeout for the release, but only while a
    scheduler is there (P9).
    """
    engine, mail = an_engine(), Mailbox("a")
    step = Step()
    engine._moves, engine._mail = cast(Any, Moves(step, mail)), mail
    engine.out, engine.header = True, replace(CLOSED, next_view=THIRD.id, view_change=THIRD)
    later = threading.Timer(0.3, lambda: mail.post(left="all others have its parts"))
    later.start()
    engine.wait_released(0.05)
    assert mail.left
    later.join()
    mail.post(left="", lost="nobody answers")
    engine.wait_released(0.05)
    assert not mail.left
    engine.close()


# ------------------------------------------------------------------------------------------------ parts


class Held:
    """Stand-in for a process's parts, which records for which names memory was made or freed."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.roomy: list[str] = []

    def states(self, names: Any) -> Any:
        return [SimpleNamespace(part=n, tensors=list, manifest=dict, volatile=list) for n in names if n != "rest"]

    def room(self, names: Any) -> None:
        self.roomy += names

    def forget(self, names: Any) -> None:
        self.forgotten += names


class Served:
    def __init__(self) -> None:
        self.names: list[str] = []

    def hold(self, name: str, *_: object, **__: object) -> None:
        self.names.append(name.partition("/")[2])

    def drop(self, name: str) -> None:
        with contextlib.suppress(ValueError):  # of a part that is not here, too, whoever asks hears so at once
            self.names.remove(name.partition("/")[2])


def moving(mail: Mailbox, holds: tuple[tuple[int, int], ...] = ()) -> tuple[PartMoves, Held, Served, list[Any]]:
    held, server = Held(), Served()
    told: list[Any] = []
    transfer = SimpleNamespace(
        server=server, ways=lambda members, view: [SimpleNamespace(member=m.id) for m in members], dial=None
    )
    moves = PartMoves(cast(Any, held), cast(Any, transfer), mail, told.append, lambda: holds, EventLog(None))
    return moves, held, server, told


def test_what_this_member_lacks_is_not_served() -> None:
    """A member owns two layers and has only one of them; it serves only that one."""
    moves, _, server, _ = moving(posted(parts=wanted()), ((0, 1),))
    moves.serve(HEAD, FIRST)
    assert server.names == ["layer.0"]


def test_what_this_member_holds_beyond_what_it_owns_is_served() -> None:
    moves, _, server, _ = moving(posted(), ((0, 4),))
    moves.serve(HEAD, FIRST)
    assert server.names == [f"layer.{i}" for i in range(4)]


def test_who_joins_again_serves_in_a_view_of_the_same_number() -> None:
    moves, _, server, _ = moving(posted(), ((0, 2),))
    moves.serve(HEAD, FIRST)
    moves.committed(FIRST)
    moves.restart()
    assert server.names == []
    moves.serve(HEAD, FIRST)
    assert server.names == ["layer.0", "layer.1"]


def test_a_newcomer_does_not_wait_for_members_that_are_about_to_get_the_part_themselves() -> None:
    """A newcomer asks owners that are not newcomers first, and asks other members as well without waiting for them."""
    view = replace(view_of(2, (ME, "b~2"), ("c~3",), ("d~4",)), joiners=(ME, "c~3"))
    moves, *_ = moving(posted())
    ways, others = moves._donors(view, 0, first=False)
    assert ([way.member for way in ways], others) == (["d~4", "b~2", "c~3"], frozenset({"b~2", "c~3"}))
    moves.committed(FIRST)
    assert moves._donors(view, 3, first=False)[1] == frozenset({"c~3", "d~4"})


def test_the_rest_is_served_and_pulled_like_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part `rest` (counters, schedules) is served and pulled like layers, but no memory is made or freed for it."""
    mail = posted(parts=(asked := replace(wanted(), parts=((2, 3), (4, 5)))))
    moves, held, server, told = moving(mail, ((0, 1), (4, 5)))
    moves.rest = cast(Any, SimpleNamespace(tensors=list, manifest=dict))
    moves.serve(HEAD, FIRST)
    assert server.names == ["layer.0", "rest"]
    pulled: list[str] = []
    report = SimpleNamespace(by_source={}, seconds=0.0, state_hash="5eed")
    monkeypatch.setattr(
        part_moves, "pull_part", lambda donors, dial, header, state, **_: pulled.append(state.part) or report
    )
    assert moves.pull(asked, time.monotonic() + 5.0)
    assert (pulled, held.roomy, held.forgotten) == (["layer.2", "rest"], ["layer.2"], [])
    assert [loaded.parts for loaded in told] == [((2, 3),), ((4, 5),)]


def test_parts_that_are_gone_are_let_go_whatever_closed_the_header() -> None:
    moves, held, _, _ = moving(posted(gone_parts=((1, 2),)))
    moves.committed(None)
    assert held.forgotten == ["layer.1"]


def test_a_pull_that_is_withdrawn_tells_of_nothing_and_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mail = posted(parts=(asked := wanted()))
    moves, held, _, told = moving(mail)

    def withdrawn(*_: object, abandoned: Callable[[], bool], **__: object) -> None:
        assert not abandoned()
        mail.post(parts=None)
        assert abandoned()
        raise StateError("nobody has it")

    monkeypatch.setattr(part_moves, "pull_part", withdrawn)
    assert not moves.pull(asked, time.monotonic() + 5.0)
    assert told == []
    assert held.forgotten == held.roomy == ["layer.2"]


def test_a_part_is_read_from_its_owners_and_if_they_fail_from_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a part fails at its owner; after a change of view the other members are asked as well."""
    mail = posted(attempt=(FIRST, 4))
    moves, _, _, _ = moving(mail)
    moves.committed(FIRST)
    asked: list[tuple[list[str], frozenset[str]]] = []

    def fails(donors: list[Any], *_: object, loading: frozenset[str], **__: object) -> None:
        asked.append(([way.member for way in donors], loading))
        if len(asked) == 1:
            mail.post(attempt=(view_of(2, (ME, "b~2"), ("c~3", "d~4")), 4))
            raise StateError("nobody has it")

    monkeypatch.setattr(part_moves, "pull_part", fails)
    assert PartReader(moves, HEAD, time.monotonic() + 5.0).tensors("layer.2") == []
    assert asked == [(["b~2"], frozenset()), (["b~2", "c~3", "d~4"], frozenset({"c~3", "d~4"}))]


def test_who_is_put_out_while_it_reads_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mail = posted(attempt=(FIRST, 4))
    moves, _, _, _ = moving(mail)

    def abandoned(*_: object, abandoned: Callable[[], bool], **__: object) -> None:
        assert not abandoned()
        mail.post(ejected=("frozen", True))
        assert abandoned()
        raise StateError("abandoned")

    monkeypatch.setattr(part_moves, "part_manifest", abandoned)
    with pytest.raises(FencedError, match="frozen"):
        PartReader(moves, HEAD, time.monotonic() + 5.0).manifest("layer.2")


def test_all_that_is_held_is_served_for_a_reader_until_the_next_header() -> None:
    moves, _, server, _ = moving(posted(attempt=(FIRST, 4)), ((0, 1), (2, 3)))
    moves.serve(HEAD, FIRST)
    moves.committed(FIRST)
    moves.serve(HEAD, FIRST)
    assert server.names == []
    moves.serve_all(HEAD)
    assert server.names == ["layer.0", "layer.2"]
    moves.serve(HEAD, FIRST)  # where the outcome is waited for
    assert server.names == ["layer.0", "layer.2"]
    moves.committed(FIRST)
    assert server.names == []


def shell_of(mail: Mailbox, units: Any = None) -> Shell:
    links = SimpleNamespace(chunk=None, generation=None, opened=lambda seq: None, abandon=lambda: None, me=ME)
    nobody = SimpleNamespace(grid=())
    teller = SimpleNamespace(tell=lambda *_: None)
    transfer = SimpleNamespace(server=nobody, arrived=lambda: None, teller=teller)
    shell = Shell(*cast(Any, (nobody, mail, EventLog(None), links, transfer, nobody, print, nobody)))
    shell.reducer = cast(Any, SimpleNamespace(open=lambda *_: None, restart=lambda _: None))
    shell.units = units
    shell.machine.member_id = ME
    return shell


@pytest.mark.parametrize("view", [SECOND, THIRD])
def test_parts_of_an_older_view_are_wanted_no_more(view: View) -> None:
    """A newer view cancels an order to pull parts for an older one, whose donor may have died."""
    mail = posted(parts=wanted(SECOND))
    shell_of(mail)._apply(fx.OpenAttempt(view, 4))
    assert (mail.parts is None) == (view is THIRD)


def test_a_view_that_lets_a_member_go_is_told_until_another_one_has_it() -> None:
    mail = posted(parts=wanted())
    shell = shell_of(mail)
    shell._apply(fx.Viewed(GONE))
    assert (mail.let_go, mail.parts) == (GONE, None)
    shell._apply(fx.Viewed(THIRD))
    assert mail.let_go is None


def test_units_forget_their_attempts_when_the_member_joins_again() -> None:
    step = Step()
    shell_of(posted(), step).reset()
    assert step.did == ["restart"]


# ------------------------------------------------------------------------------------------------ a newcomer

PULL = fx.PullState(HEAD, SECOND, ((2, 5),))


def entrance(mail: Mailbox, moves: Moves | None, fed: list[Any]) -> Entrance:
    machine = SimpleNamespace(parts=MemberParts())
    shell = SimpleNamespace(feed=fed.append, loop=SimpleNamespace(call=lambda f: f()), machine=machine)
    transfer = SimpleNamespace(
        mixed="", arrived=lambda: None, publish=lambda *_: None, fetch=lambda *_: fed.append("the state") is None
    )
    return Entrance(
        cast(Any, shell), mail, cast(Any, transfer), cast(Any, SimpleNamespace(layout=None)), pytest.fail, moves
    )


def test_a_newcomer_pulls_the_rest_as_one_of_its_parts() -> None:
    mail, step = Mailbox("a"), Step()
    shell_of(mail)._apply(PULL)
    fed: list[Any] = []
    moves = Moves(step, mail)
    arrival = entrance(mail, moves, fed).enter(cast(Any, None), None, time.monotonic() + 5.0)
    assert arrival is not None
    assert (arrival.role, arrival.header, arrival.view) == ("joiner", HEAD, SECOND)
    assert (fed, step.did, mail.parts) == ([], [f"pull {SECOND.id}"], None)


def test_a_newcomer_without_pipelines_tells_which_view_it_pulled_in() -> None:
    whole = replace(SECOND, pipelines="")
    fed: list[Any] = []
    mail = Mailbox("a", pull=fx.PullState(HEAD, whole))
    assert entrance(mail, None, fed).enter(cast(Any, None), None, time.monotonic() + 5.0) is not None
    assert fed == ["the state", fx.StateLoaded(HEAD.hash, fx.WHOLE, whole.id)]


def test_a_newer_header_ends_a_newcomers_pull() -> None:
    mail, step = Mailbox("a", pull=PULL), Step()
    newer = fx.PullState(CLOSED, THIRD, ((2, 5),))
    answers = iter([False, True])

    def pulled() -> bool:
        if not (answer := next(answers)):
            shell_of(mail)._apply(newer)
        return answer

    arrival = entrance(mail, Moves(step, mail, pulled), []).enter(cast(Any, None), None, time.monotonic() + 5.0)
    assert arrival is not None
    assert arrival.header == CLOSED


JOINING = replace(SECOND, joiners=(ME,))


def test_a_newcomer_whose_file_is_of_its_header_has_loaded_it_before_it_pulls_the_rest() -> None:
    """A newcomer that offered a kept file of the founding header loads the parts in it, and pulls only what it
    lacks.
    """
    base = replace(HEAD, seq=2)
    mail, step = posted(pull=fx.PullState(base, JOINING, ((1, 2),)), view=JOINING), Step()
    at = entrance(mail, Moves(step, mail, lambda: mail.post(parts=None) is None), [])
    at.load = lambda header, state: step.did.append(f"load {header.seq}")
    at.shell.machine.parts.kept = Kept(base, "a~9", parts=((0, 1), (4, 5)))
    assert at.enter(cast(Any, None), None, time.monotonic() + 5.0) is not None
    assert step.did == ["load 2", f"pull {SECOND.id}"]
    mail.post(pull=PULL, view=JOINING)
    assert at.enter(cast(Any, None), None, time.monotonic() + 5.0) is not None
    assert step.did[2:] == [f"pull {SECOND.id}"], "its file is of another header"


@pytest.mark.parametrize("lacks", [True, False])
def test_a_newcomer_that_a_decision_has_go_on_in_the_midst_of_its_pull_pulls_what_it_lacks(lacks: bool) -> None:
    """A decision makes a newcomer a full member during its pull; it pulls what the new view requires, and has joined
    then (P10).
    """
    mail, step = posted(pull=replace(PULL, view=JOINING), view=JOINING), Step()
    more = fx.PullParts(HEAD, THIRD, ((3, 4),))

    def pulled() -> bool:
        if len(step.did) > 1:
            return True
        mail.post(view=THIRD, parts=more if lacks else None)
        return False

    at = entrance(mail, Moves(step, mail, pulled), [])
    arrival = at.enter(cast(Any, None), None, time.monotonic() + 5.0)
    assert arrival is not None
    assert (arrival.role, arrival.header, arrival.view) == ("joiner", HEAD, THIRD)
    assert step.did == [f"pull {SECOND.id}", *([f"pull {THIRD.id}"] if lacks else [])]
    assert at.transfer.mixed == ""


def test_a_decision_that_comes_between_a_header_and_its_pull_is_not_forgotten() -> None:
    mail, step = (
        posted(pull=replace(PULL, view=JOINING), view=THIRD, parts=fx.PullParts(HEAD, THIRD, ((3, 4),))),
        Step(),
    )
    arrival = entrance(mail, Moves(step, mail), []).enter(cast(Any, None), None, time.monotonic() + 5.0)
    assert arrival is not None
    assert (step.did, arrival.view) == ([f"pull {THIRD.id}"], THIRD)


def test_a_newcomer_that_is_put_out_in_the_midst_of_its_pull_is_told_so() -> None:
    mail, step = posted(pull=replace(PULL, view=JOINING), view=JOINING), Step()

    def pulled() -> bool:
        assert len(step.did) < 3, "it pulls for ever"
        mail.post(ejected=("another base", True))
        return False

    with pytest.raises(FencedError, match="another base"):
        entrance(mail, Moves(step, mail, pulled), []).enter(cast(Any, None), None, time.monotonic() + 5.0)


@pytest.mark.parametrize("units", [True, False])
def test_a_view_that_does_not_fit_this_member_is_refused_by_name(units: bool) -> None:
    view = replace(SECOND, pipelines="") if units else SECOND
    for mail in (Mailbox("b", pull=fx.PullState(HEAD, view)), Mailbox("b", view=view)):
        with pytest.raises(
            ConfigurationError, match=r"view 1\.2 has (no )?pipelines, and this member (runs|does not run)"
        ):
            entrance(mail, Moves(Step(), mail) if units else None, []).enter(
                cast(Any, None), None, time.monotonic() + 5.0
            )
