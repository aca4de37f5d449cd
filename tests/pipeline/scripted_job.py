"""Engines in threads of one process, and a script in the scheduler's place: it says what views there are.

Engines are the product's, with links, the machine of a member, transfers and units. The script founds the job, decides
after a member's death, and announces views; it knows no rule but those that a test needs.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from border_nodes import DEADLINE_S
from step_nodes import parts_of
from until_support import until

from chaos_lightning.collectives.layout import Section
from chaos_lightning.member.engine import Engine
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.member.unit_steps import UnitsDone
from chaos_lightning.membership.parts import division
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.executor import SlotAttempt
from chaos_lightning.pipeline.parts import REST
from chaos_lightning.pipeline.step import PipelineStep
from chaos_lightning.protocol.types import (
    GENESIS,
    Decide,
    LinkKeys,
    Member,
    NextView,
    OpenLinks,
    PlanSpec,
    Prepare,
    Ready,
    Report,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.replication.part_state import PartState
from chaos_lightning.settings import EngineConfig

CHAIN = "a chain"


class Held:
    """Parts of a model with one optimizer."""

    def __init__(self, net, parts, optimizer):
        self.memory = ModelMemory(net, 1, "cpu")
        self._net, self._parts, self._optimizer = net, parts, optimizer

    def names(self, parts):
        return [n for part in parts for n in self._parts.names(part)]

    def states(self, names):
        return [
            PartState(n, self._net, self._parts.names(n), [self._optimizer])
            for n in names
            if n != REST and self._parts.names(n)
        ]

    def room(self, names):
        self.memory.room(self.names(names))

    def forget(self, names):
        for state in self.states(names):
            state.forget()
        self.memory.leave_out(self.names(names))


class ScriptedMember:
    """An engine with a model, of which it has memory for what it holds."""

    def __init__(self, job, name, net, layers_for, make_optimizer):
        self.job, self.name = job, name
        self.net = copy.deepcopy(net)
        self.said = []
        self.engine = Engine(
            EngineConfig(job="job", name=name.partition("~")[0], log_dir="none", step_timeout_s=DEADLINE_S)
        )
        self.engine.prepare(
            sections=[Section("all", list(self.net.named_parameters()))],
            buffers=reduced_buffers(self.net),
            part_of=job.parts.part_of,
        )
        self.optimizer = make_optimizer(self.net.parameters())
        exchange = BorderExchange(self.engine.send_border)
        self.step = PipelineStep(
            self.net, layers_for(self.net), exchange, self.engine.accumulation, job.parts, timeout_s=DEADLINE_S
        )
        self.held = Held(self.net, job.parts, self.optimizer)
        self.engine.attach(self.step, self.held)
        self.shell = self.engine._made.shell
        self.shell.to_scheduler = self.said.append
        self.shell.listen("127.0.0.1", (0,))
        self.loop = self.engine._loop
        self.loop.start()
        self.at_unit = None
        """Called with a number before each unit that it runs."""
        self.attempts = []

    @property
    def member(self):
        return Member(self.name, self.name.partition("~")[0], "host", "127.0.0.1", self.engine._links.port)

    def hear(self, *messages):
        for message in messages:
            assert self.loop.call_and_wait(lambda m=message: self.shell.control(m), DEADLINE_S)

    def found(self, view):
        """Stands at GENESIS, with what the view has it make."""
        parts = division(view)
        made = [parts.names[p] for start, stop in parts.made(self.name) for p in range(start, stop)]
        self.held.memory.leave_out([n for n, part in self.job.parts.part_of.items() if part not in made])
        self.engine.view = self.engine.ruling_view = view
        self.engine.role = "founder"

    def train(self, steps, batches, weights):
        """Optimizer steps, each over all micro-batches; returns the headers."""
        torch.set_num_threads(1)
        headers = []
        for _ in range(steps):
            headers.append(self.engine.step_by_units(lambda view, seq: self._attempt(view, seq, batches, weights)))
            self.optimizer.step()
        return headers

    def _attempt(self, view, seq, batches, weights):
        self.attempts.append((view.id, seq))
        pipelines = division(view).pipelines
        numbers = iter(range(1000))
        check = BorderExchange.check

        def look(attempt):
            if self.at_unit is not None:
                self.at_unit(next(numbers))
            check(self.step.borders, attempt)

        self.step.borders.check = look
        self.step.open(SlotAttempt(view.id, seq), pipelines, self.name)
        done = self.step.run(self.engine.header.step + 1, batches.__getitem__, weights.__getitem__)
        return UnitsDone(
            weight=done.weight, presence=done.presence, micro_batches=done.micro_batches, coverage=done.coverage
        )

    def die(self):
        self.loop.call_and_wait(lambda: self.engine._links.close(bye=False), DEADLINE_S)

    def close(self):
        self.engine.close()


class ScriptedJob:
    """The members, and the script."""

    def __init__(self, net, names, layers_for, make_optimizer):
        self.parts = parts_of(net)
        self.shared = {p.removeprefix("shared."): its for p, its in self.parts.users.items() if p.startswith("shared.")}
        self.members = [ScriptedMember(self, name, net, layers_for, make_optimizer) for name in names]
        self.number = 0

    def view(self, pipelines, members, leaving=()):
        """The next view, with pipelines of these members."""
        self.number += 1
        text = replace(pipelines, shared=self.shared).to_json()
        return View(
            ViewId(1, self.number),
            ViewId(1, self.number - 1),
            tuple(m.member for m in members),
            plan=PlanSpec("rotating", 16384),
            chain=CHAIN,
            pipelines=text,
            leaving=tuple(m.member for m in leaving),
        )

    def found(self, pipelines):
        rows = {m.name: m.member for m in self.members}
        for m in self.members:
            m.hear(
                Welcome(rows[m.name], 1, "founder", "", 0.1, 60.0, chain=CHAIN),
                LinkKeys("auto", "checksum", "checksum", False, (), ()),
            )
        for m in self.members:
            m.hear(OpenLinks(tuple(r for n, r in rows.items() if n != m.name)))
        for m in self.members:
            until(lambda m=m: any(isinstance(s, Ready) for s in m.said), f"links of {m.name}")
        view = self.view(pipelines, self.members)
        for m in self.members:
            m.found(view)
            m.hear(Decide(view, GENESIS, reason="founded"))
        return view

    def recover(self, pipelines, members):
        """What the scheduler does after a death: everybody stands on the same header, and goes on with this view."""
        self.number += 1
        number = ViewId(1, self.number)
        for m in members:
            m.hear(Prepare(number, "somebody died"))
        reports = [next(s for s in reversed(m.said) if isinstance(s, Report)) for m in members]
        assert all(r.number == number for r in reports)
        assert len({r.head for r in reports}) == 1, "this script knows no hand-on"
        self.number -= 1
        view = self.view(pipelines, members)
        for m in members:
            m.hear(Decide(view, reports[0].last, reason="the others go on"))
        return view

    def announce(self, pipelines, members):
        """A view that the next header carries."""
        view = self.view(pipelines, members)
        for m in self.members:
            m.hear(NextView(view))
        return view

    def train(self, steps, batches, weights, members=None, meanwhile=lambda: None):
        """All members' headers, by name, or the error of one that died."""
        members = members or self.members

        def one(member):
            try:
                return member.train(steps, batches, weights)
            except DeathError as error:
                return error

        with ThreadPoolExecutor(len(members)) as pool:
            futures = {m.name: pool.submit(one, m) for m in members}
            meanwhile()
        return {name: f.result() for name, f in futures.items()}

    def parameters(self, members=None):
        """By name, at the members that have them; all owners' are equal."""
        found = {}
        for m in members or self.members:
            for name, p in m.net.named_parameters():
                if not is_absent(p):
                    assert name not in found or torch.equal(found[name], p), (m.name, name)
                    found[name] = p.detach()
        return found

    def close(self):
        for m in self.members:
            m.close()


class DeathError(Exception):
    """The member is no more."""


class Dying:
    """Has a member die before a unit of its own, and the others recover with other pipelines."""

    def __init__(self, job, member, at, pipelines):
        self._job, self._member, self._pipelines = job, member, pipelines
        self._died = threading.Event()

        def unit(number):
            if number == at:
                member.die()
                self._died.set()
                raise DeathError

        member.at_unit = unit

    def recover(self):
        assert self._died.wait(DEADLINE_S)
        left = [m for m in self._job.members if m is not self._member]
        self._job.recover(self._pipelines, left)
