"""The loop over a step's attempts and other slots' waits, where parts move: what is dropped, served, pulled, and when.

The training thread is this one; what the I/O thread says is posted before, or by what the loop calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_lightning.collectives.layout import Section
from chaos_lightning.errors import ConfigurationError, FencedError, StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member import part_moves
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.entrance import Entrance
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.part_moves import PartMoves
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.unit_steps import UnitsDone, await_commit, run_attempts
from chaos_lightning.membership import effects as fx
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, Member, View, ViewId
from chaos_lightning.settings import EngineConfig

HEAD = replace(GENESIS, seq=3, step=3, view=ViewId(1, 1))
CLOSED = replace(HEAD, seq=4, step=4)
ME = "a~1"


def view_of(number: int, *rows: tuple[str, ...], layers: int = 4) -> View:
    """Pipelines of these members, whose stages have equally many layers."""
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


class Step:
    """A `UnitStep` that writes down what it is told."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.did.append(name)


class Moves:
    """Writes into a step's list, too; a pull ends as `pulled` says."""

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
    return run_attempts(cast(Any, step), attempt, moves, mail, HEAD, lambda *_: None, lambda: time.monotonic() + 5.0)


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
    """Its forward passes moved buffers, which are neither to be served as the header's nor to be remembered so."""
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
    with pytest.raises(FencedError, match="frozen"):
        await_commit(Moves(step, mail), mail, HEAD, "a gather", time.monotonic() + 5.0)


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


# ------------------------------------------------------------------------------------------------ parts


class Held:
    """Parts by name; writes down what is forgotten."""

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
        self.names.remove(name.partition("/")[2])


def moving(mail: Mailbox, holds: tuple[tuple[int, int], ...] = ()) -> tuple[PartMoves, Held, Served, list[Any]]:
    held, server = Held(), Served()
    told: list[Any] = []
    transfer = SimpleNamespace(server=server, ways=lambda members, view: [m.id for m in members], dial=None)
    return PartMoves(cast(Any, held), cast(Any, transfer), mail, told.append, lambda: holds), held, server, told


def test_what_this_member_lacks_is_not_served() -> None:
    """It has just come and owns layers 0 and 1, of which the second one has drifted."""
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


def shell_of(mail: Mailbox, units: Any = None) -> Shell:
    links = SimpleNamespace(chunk=None, generation=None, opened=lambda seq: None, abandon=lambda: None)
    nobody = SimpleNamespace(grid=())
    transfer = SimpleNamespace(server=nobody, arrived=lambda: None)
    shell = Shell(*cast(Any, (nobody, mail, EventLog(None), links, transfer, nobody, print, nobody)))
    shell.reducer = cast(Any, SimpleNamespace(open=lambda *_: None, restart=lambda _: None))
    shell.units = units
    return shell


@pytest.mark.parametrize("view", [SECOND, THIRD])
def test_parts_of_an_older_view_are_wanted_no_more(view: View) -> None:
    """Its donor died, and the newer view gives the part to somebody else: nothing else would end the pull."""
    mail = posted(parts=wanted(SECOND))
    shell_of(mail)._apply(fx.OpenAttempt(view, 4))
    assert (mail.parts is None) == (view is THIRD)


def test_units_forget_their_attempts_when_the_member_joins_again() -> None:
    step = Step()
    shell_of(posted(), step).reset()
    assert step.did == ["restart"]


# ------------------------------------------------------------------------------------------------ a newcomer

PULL = fx.PullState(HEAD, SECOND, ((2, 5),))


def entrance(mail: Mailbox, moves: Moves | None, fed: list[Any]) -> Entrance:
    shell = SimpleNamespace(feed=fed.append, loop=SimpleNamespace(call=lambda f: f()))
    transfer = SimpleNamespace(
        mixed="", arrived=lambda: None, publish=lambda *_: None, fetch=lambda *_: fed.append("rest") is None
    )
    return Entrance(
        cast(Any, shell), mail, cast(Any, transfer), cast(Any, SimpleNamespace(layout=None)), pytest.fail, moves
    )


def test_a_newcomer_pulls_the_rest_and_then_its_parts() -> None:
    mail, step = Mailbox("a"), Step()
    shell_of(mail)._apply(PULL)
    fed: list[Any] = []
    moves = Moves(step, mail)
    arrival = entrance(mail, moves, fed).enter(cast(Any, None), None, time.monotonic() + 5.0)
    assert arrival is not None
    assert (arrival.role, arrival.header, arrival.view) == ("joiner", HEAD, SECOND)
    assert (fed, step.did, mail.parts) == (["rest"], [f"pull {SECOND.id}"], None)


def test_a_newcomer_without_pipelines_tells_which_view_it_pulled_in() -> None:
    whole = replace(SECOND, pipelines="")
    fed: list[Any] = []
    mail = Mailbox("a", pull=fx.PullState(HEAD, whole))
    assert entrance(mail, None, fed).enter(cast(Any, None), None, time.monotonic() + 5.0) is not None
    assert fed == ["rest", fx.StateLoaded(HEAD.hash, fx.WHOLE, whole.id)]


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
