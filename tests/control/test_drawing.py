"""Tests that plans are computed in another process, one at a time, and that its failure is answered, too."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from until_support import until

from chaos_lightning.control.drawing import Drawing, Drawn, request
from chaos_lightning.membership.effects import DrawPlan, PipelinesFound, PlanDrawn, SearchPipelines
from chaos_lightning.membership.searching import searched
from chaos_lightning.membership.views import replanned
from chaos_lightning.planning.pipelines.job import Device, Layer, TrainingJob
from chaos_lightning.planning.pipelines.pipeliner import PlanWish
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.planning.quick import quick
from chaos_lightning.planning.trees import misfit
from chaos_lightning.protocol.types import SMALL_JOB, Member, PlanSpec

DEADLINE_S = 60.0
WAITING = "import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); sys.stdin.read()"
HANGING = f"{WAITING}; import signal; signal.pause()"


def wish(token: int = 1, kind: str = "auto") -> DrawPlan:
    """Returns a planning request for a ring with one slow link, one member too large to be planned at once."""
    members = tuple(Member(f"n{i}~{i}", f"n{i}", f"h{i}", "127.0.0.1", 1) for i in range(SMALL_JOB + 1))
    ids = [m.id for m in members]
    links = {(ids[i], ids[i + 1]): (0.001, 1e9, 1e9) for i in range(SMALL_JOB)}
    links |= {(ids[0], ids[-1]): (0.001, 1e9, 1e9), (ids[3], ids[4]): (0.001, 1e5, 1e5)}
    return DrawPlan(token, PlanSpec(kind, chunk_nbytes=4096), quick(members, links)[0], members, links, hasty=True)


class Answers:
    """Collects the planner's answers, and sets an event when one has come."""

    def __init__(self) -> None:
        self.all: list[Drawn] = []
        self.came = asyncio.Event()

    def take(self, answer: Drawn) -> None:
        self.all.append(answer)
        self.came.set()

    async def first(self) -> Drawn:
        await asyncio.wait_for(self.came.wait(), DEADLINE_S)
        return self.all[0]


def command(code: str, *words: object) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *map(str, words))


async def pid_in(path: Path) -> int:
    """Waits until a process has written its id into a file; returns the id."""
    await asyncio.to_thread(until, lambda: path.exists() and path.read_text(), "a process to begin")
    return int(path.read_text())


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("kind", ["widest", "fapt"])
def test_another_process_draws_what_this_one_would(kind: str) -> None:
    async def play() -> None:
        answers = Answers()
        drawing = Drawing(answers.take)
        drawing.draw(wish(7, kind))
        answer = await answers.first()
        await drawing.close()
        assert (answer.plan, answer.reason) == replanned(wish(7, kind))
        assert answer.token == 7
        assert answer.plan is not None
        assert misfit(answer.plan, [m.id for m in wish().members], wish().links) == ""
        assert answer.plan.chunk_nbytes == 4096

    asyncio.run(play())


def test_what_a_planner_prints_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's planner that prints to stdout and fails makes an answer with its error; the print is not taken for
    one.
    """
    (tmp_path / "chatty.py").write_text(
        "def draw(network, nbytes):\n    print('{}', flush=True)\n    raise OSError(9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    async def play() -> None:
        answers = Answers()
        drawing = Drawing(answers.take)
        drawing.draw(wish(kind="chatty:draw"))
        assert await answers.first() == PlanDrawn(1, None, "planner 'chatty:draw' failed: OSError: 9")
        await drawing.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "ended with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
        ("print('no JSON')", "failed: JSONDecodeError"),
        (f"print({json.dumps({'reason': 'x'})!r})", "failed: KeyError"),
        (HANGING, "was ended after 2 s"),
    ],
)
def test_a_process_that_fails_is_an_answer(code: str, words: str, tmp_path: Path) -> None:
    async def play() -> None:
        answers = Answers()
        drawing = Drawing(answers.take, command(code, tmp_path / "pid"), limit_s=2.0)
        drawing.draw(wish())
        answer = await answers.first()
        assert answer.plan is None
        assert words in answer.reason
        await drawing.close()

    asyncio.run(play())


def test_an_answer_that_nobody_waits_for_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "chaos_lightning.control.drawing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(request(wish()), timeout=DEADLINE_S)
    assert (process.returncode, said) == (0, b"")


def test_the_newest_request_ends_the_one_before_and_the_end_ends_all(tmp_path: Path) -> None:
    async def play() -> None:
        answers = Answers()
        drawing = Drawing(answers.take, command(HANGING, tmp_path / "pid"))
        drawing.draw(wish(1))
        first = await pid_in(tmp_path / "pid")
        (tmp_path / "pid").unlink()
        drawing.draw(wish(2))
        second = await pid_in(tmp_path / "pid")
        assert first != second
        assert not runs(first), "one at a time"
        await drawing.close()
        assert not runs(second)
        assert answers.all == []
        await drawing.close()  # nothing is left to end

    asyncio.run(play())


# ------------------------------------------------------------------ pipelines


def search(token: int = 1) -> SearchPipelines:
    """Returns a request for pipelines of three members, of which one is twice as fast as the others."""
    layers = tuple(Layer(name=f"block.{i}", forward_s=1.0, backward_s=2.0, parameter_nbytes=10) for i in range(4))
    devices = tuple(Device(name=f"m{i}~{i}", memory_nbytes=1000, speed=1.0 + (i == 0)) for i in range(3))
    return SearchPipelines(
        token, json.dumps(PlanWish(TrainingJob(layers=layers, devices=devices, micro_batches=6), 2).to_dict())
    )


def test_another_process_searches_for_pipelines_beside_one_that_draws_trees() -> None:
    async def play() -> None:
        trees, pipelines = Answers(), Answers()
        drawing, searching = Drawing(trees.take), Drawing(pipelines.take)
        drawing.draw(wish(7))
        searching.draw(search(9))
        found, drawn = await pipelines.first(), await trees.first()
        await drawing.close()
        await searching.close()
        assert found == searched(search(9))
        assert isinstance(found, PipelinesFound)
        assert found.plan is not None
        assert PipelinePlan.from_json(found.plan).devices == ("m0~0", "m1~1", "m2~2")
        assert isinstance(drawn, PlanDrawn)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
        ("print('no JSON')", "failed: JSONDecodeError"),
        ('print(\'{"plan": "x", "reason": ""}\')', "failed: PlanError"),
        (HANGING, "was ended after 2 s"),
    ],
)
def test_a_search_that_fails_is_an_answer(code: str, words: str, tmp_path: Path) -> None:
    async def play() -> None:
        answers = Answers()
        searching = Drawing(answers.take, command(code, tmp_path / "pid"), limit_s=2.0)
        searching.draw(search(5))
        answer = await answers.first()
        assert (answer.token, answer.plan) == (5, None)
        assert isinstance(answer, PipelinesFound)
        assert words in answer.reason
        await searching.close()

    asyncio.run(play())
