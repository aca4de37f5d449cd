"""Computes new plans (reduction trees, pipelines) in a child process, so that no decision of the scheduler waits for
one.

Theory of operation. A planner computes for seconds or minutes, and a thread that does so keeps the interpreter's lock
from the scheduler's loop. So each request goes to a process of its own, which runs this module: JSON in, JSON out, at
low priority. A `Drawing` has one at a time: a newer request ends the process of the one before, and so does the end of
the scheduler, whichever way it comes. A process that dies, says nothing sensible or takes too long is an answer, too:
there is no better plan, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from chaos_lightning.machine.orphan import die_with_parent
from chaos_lightning.membership.effects import DrawPlan, PipelinesFound, PlanDrawn, SearchPipelines
from chaos_lightning.membership.searching import searched
from chaos_lightning.membership.views import replanned
from chaos_lightning.planning.pipelines.plan import PipelinePlan
from chaos_lightning.protocol.types import Member, PlanSpec, TreeSpec

LIMIT_S = 600.0
"""Seconds after which a planner is ended."""
_NICE = 10
_COMMAND = (sys.executable, "-m", "chaos_lightning.control.drawing")
Request = DrawPlan | SearchPipelines
Drawn = PlanDrawn | PipelinesFound


class Drawing:
    """Runs a planner process, one at a time. Methods belong to one asyncio loop.

    Args:
        answered: Takes the answer to the last request.
        command: Runs this module.
        limit_s: Seconds after which a planner is ended.
    """

    def __init__(
        self,
        answered: Callable[[Drawn], None],
        command: tuple[str, ...] = _COMMAND,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._answered = answered
        self._command = command
        self._limit_s = limit_s
        self._task: asyncio.Task[None] | None = None

    def draw(self, wish: Request) -> None:
        """Starts to compute a plan, and gives up the one before, if it is not finished."""
        before, self._task = self._task, None
        if before is not None:
            before.cancel()
        self._task = asyncio.get_running_loop().create_task(self._draw(wish, before))

    async def close(self) -> None:
        """Ends the planner process, if there is one; `answered` is not called any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _draw(self, wish: Request, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            answer = await self._asked(wish)
        except TimeoutError:
            answer = _none(wish, f"the planner was ended after {self._limit_s:g} s")
        except (OSError, ValueError, TypeError, KeyError) as error:
            answer = _none(wish, f"the process that draws plans failed: {type(error).__name__}: {error}")
        self._answered(answer)

    async def _asked(self, wish: Request) -> Drawn:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # a planner may be anywhere
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(request(wish)), self._limit_s)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            return _none(wish, f"the process that draws plans ended with code {process.returncode}")
        answer = json.loads(said)
        plan, reason = answer["plan"], str(answer["reason"])
        if isinstance(wish, DrawPlan):
            return PlanDrawn(wish.token, plan and _plan(plan), reason)
        return PipelinesFound(wish.token, PipelinePlan.from_json(plan).to_json() if plan else None, reason)


def _none(wish: Request, reason: str) -> Drawn:
    """Returns the answer that no other plan was found."""
    made = PlanDrawn if isinstance(wish, DrawPlan) else PipelinesFound
    return made(wish.token, None, reason)


def request(wish: Request) -> bytes:
    """Returns a planning request as JSON for the planner process."""
    if isinstance(wish, SearchPipelines):
        return _written({"pipelines": wish})
    return _written({"trees": {**_fields(wish), "links": list(wish.links.items())}})


def _written(value: object) -> bytes:
    return json.dumps(value, default=_fields).encode()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plan(said: Mapping[str, Any]) -> PlanSpec:
    trees = (TreeSpec(**{**t, "members": tuple(t["members"]), "parents": tuple(t["parents"])}) for t in said["trees"])
    return PlanSpec(str(said["kind"]), int(said["chunk_nbytes"]), tuple(trees))


def _answer(said: dict[str, Any]) -> Drawn:
    """Computes the answer to a planning request that was read from JSON."""
    if (asked := said.get("pipelines")) is not None:
        return searched(SearchPipelines(**asked))
    said = said["trees"]
    said["spec"], said["present"] = _plan(said["spec"]), _plan(said["present"])
    said["members"] = tuple(Member(**member) for member in said["members"])
    said["links"] = {tuple(ends): tuple(values) for ends, values in said["links"]}
    wish = DrawPlan(**said)
    return PlanDrawn(wish.token, *replanned(wish))


def main() -> None:
    """Reads a request from stdin and writes the answer to stdout; what the planner prints goes to stderr."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    die_with_parent(signal.SIGKILL)
    os.nice(_NICE)
    answer = _answer(json.load(sys.stdin))
    # A scheduler that died while this process began is no parent by whose death it could end.
    with contextlib.suppress(BrokenPipeError), open(answers, "wb") as out:
        out.write(_written(answer))


if __name__ == "__main__":
    main()
