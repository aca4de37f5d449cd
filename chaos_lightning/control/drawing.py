"""Draws plans in another process, so that no decision waits for one.

Theory of operation. A planner computes for seconds or minutes, and a thread that does so keeps the interpreter's lock
from the scheduler's loop. So each request goes to a process of its own, which runs this module: JSON in, JSON out, at
low priority. There is one at a time: a newer request ends the process of the one before, and so does the end of the
scheduler, whichever way it comes. A process that dies, says nothing sensible or takes too long is an answer, too:
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
from chaos_lightning.membership.effects import DrawPlan, PlanDrawn
from chaos_lightning.membership.views import replanned
from chaos_lightning.protocol.types import Member, PlanSpec, TreeSpec

LIMIT_S = 600.0
"""Seconds after which a planner is ended."""
_NICE = 10
_COMMAND = (sys.executable, "-m", "chaos_lightning.control.drawing")


class Drawing:
    """See the module. Methods belong to one asyncio loop.

    Args:
        answered: Takes the answer to the last request.
        command: Runs this module.
        limit_s: Seconds after which a planner is ended.
    """

    def __init__(
        self,
        answered: Callable[[PlanDrawn], None],
        command: tuple[str, ...] = _COMMAND,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._answered = answered
        self._command = command
        self._limit_s = limit_s
        self._task: asyncio.Task[None] | None = None

    def draw(self, wish: DrawPlan) -> None:
        """Begins to draw; what was asked for before is given up."""
        before, self._task = self._task, None
        if before is not None:
            before.cancel()
        self._task = asyncio.get_running_loop().create_task(self._draw(wish, before))

    async def close(self) -> None:
        """Ends the process, if there is one; no answer comes any more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _draw(self, wish: DrawPlan, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            plan, reason = await self._asked(wish)
        except TimeoutError:
            plan, reason = None, f"the planner was ended after {self._limit_s:g} s"
        except (OSError, ValueError, TypeError, KeyError) as error:
            plan, reason = None, f"the process that draws plans failed: {type(error).__name__}: {error}"
        self._answered(PlanDrawn(wish.token, plan, reason))

    async def _asked(self, wish: DrawPlan) -> tuple[PlanSpec | None, str]:
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
            return None, f"the process that draws plans ended with code {process.returncode}"
        answer = json.loads(said)
        return answer["plan"] and _plan(answer["plan"]), str(answer["reason"])


def request(wish: DrawPlan) -> bytes:
    """A request as the process takes it."""
    return _written({**_fields(wish), "links": list(wish.links.items())})


def _written(value: object) -> bytes:
    return json.dumps(value, default=_fields).encode()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plan(said: Mapping[str, Any]) -> PlanSpec:
    trees = (TreeSpec(**{**t, "members": tuple(t["members"]), "parents": tuple(t["parents"])}) for t in said["trees"])
    return PlanSpec(str(said["kind"]), int(said["chunk_nbytes"]), tuple(trees))


def main() -> None:
    """Takes a request from stdin and writes the answer to stdout; what a planner prints goes to stderr."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    die_with_parent(signal.SIGKILL)
    os.nice(_NICE)
    said = json.load(sys.stdin)
    said["spec"], said["present"] = _plan(said["spec"]), _plan(said["present"])
    said["members"] = tuple(Member(**member) for member in said["members"])
    said["links"] = {tuple(ends): tuple(values) for ends, values in said["links"]}
    plan, reason = replanned(DrawPlan(**said))
    # A scheduler that died while this process began is no parent by whose death it could end.
    with contextlib.suppress(BrokenPipeError), open(answers, "wb") as out:
        out.write(_written({"plan": plan, "reason": reason}))


if __name__ == "__main__":
    main()
