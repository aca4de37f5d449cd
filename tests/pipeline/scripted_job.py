"""Runs engines in threads of one process, with a script in place of the scheduler that decides the views.

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
from chaos_lightning.member.hello import hello
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.membership.parts import division
from chaos_lightning.membership.peers import FIT
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.attempts import UnitAttempt
from chaos_lightning.pipeline.borders import BorderExchange
from chaos_lightning.pipeline.building import ModelMemory
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
    Spent,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.replication.access import ModuleState
from chaos_lightning.replication.part_state import PartState
from chaos_lightning.settings import EngineConfig

CHAIN = "a chain"
CONFIG = {
    "job": "job",
    "endpoint": "127.0.0.1:9",
    "bind": "127.0.0.1",
    "log_dir": "none",
    "step_timeout_s": DEADLINE_S,
}


def positions(step, j, batch):
    """Returns the positions of the epoch that a micro-batch of a step uses."""
    start = 1000 * step + 100 * j
    return (Spent("", 0, ((start, start + len(batch[0])),)),)


class Control:
    """Stand-in for a control stream, which records this member's messages."""

    def __init__(self, said):
        self.send = said.append

    def open(self, shell, make_hello):
        self.send(make_hello())

    def close(self): ...


class Held:
    """Model parts and optimizer of one member, as the engine asks for them."""

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
    """Member with a real engine and a copy of the model, in which only the parts that it holds have memory."""

    def __init__(self, job, name, net, layers_for, make_optimizer, config):
        self.job, self.name = job, name
        self.net = copy.deepcopy(net)
        self.said = []
        self.engine = Engine(EngineConfig(**{**CONFIG, "name": name.partition("~")[0], **config}))
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
        self.rest = ModuleState(self.net, [self.optimizer], rest=job.parts.names(REST))
        self.engine._control = Control(self.said)
        self.shell = self.engine._made.shell
        self.shell.to_scheduler = self.said.append
        self.shell.listen("127.0.0.1", (0,))
        self.loop = self.engine._loop
        self.loop.start()
        self.at_unit = None
        """Called with a number before each unit that it runs."""
        self.attempts = []
        self.outcomes = []

    @property
    def member(self):
        return Member(self.name, self.name.partition("~")[0], "host", "127.0.0.1", self.engine._links.port)

    def hear(self, *messages):
        for message in messages:
            assert self.loop.call_and_wait(lambda m=message: self.shell.control(m), DEADLINE_S)

    def found(self, view):
        """Puts the member into the founding view, with the parts that it makes there."""
        parts = division(view)
        made = [parts.names[p] for start, stop in parts.made(self.name) for p in range(start, stop)]
        self.held.memory.leave_out([n for n, part in self.job.parts.part_of.items() if part not in made])
        self.engine.view = self.engine.ruling_view = view
        self.engine.role = "founder"
        self.engine._moves.rest = self.rest
        self.engine._hello = hello(
            self.engine.config,
            port=self.engine._links.port,
            quota=1,
            accumulate=1,
            fingerprint={FIT: "1"},
            layout=self.engine.accumulation.layout,
        )

    def join(self):
        """Joins as a newly started process, with memory for no part."""
        self.held.memory.leave_out(list(self.job.parts.part_of))
        return self.engine.join(fingerprint={}, quota=1, accumulate=1, state=self.rest)

    def last(self, kind):
        """Returns the newest message of a kind that the member has sent; None if there is none."""
        return next((s for s in reversed(self.said) if isinstance(s, kind)), None)

    def train(self, steps, batches, weights):
        """Makes optimizer steps, each over all micro-batches; returns their headers."""
        torch.set_num_threads(1)
        headers = []
        while len(headers) < steps and not self.engine.out:
            number = self.engine.header.step + 1
            attempt = UnitAttempt(
                self.step,
                self.name,
                number,
                batches.__getitem__,
                weights.__getitem__,
                spent=lambda j, number=number: positions(number, j, batches[j]),
                extra=lambda sums: {j: b"%d" % j for j in sums.losses},
            )
            headers.append(self.engine.step_by_units(lambda view, seq, a=attempt: self._attempt(a, view, seq)))
            self.outcomes.append(attempt.outcome(headers[-1]))
            self.after_commit(self.outcomes[-1])
            self.optimizer.step()
            self.engine.stepped()
        return headers

    def after_commit(self, outcome):
        """Hook for subclasses, called after a commit and before the optimizer steps."""

    def _attempt(self, attempt, view, seq):
        self.attempts.append((view.id, seq))
        numbers = iter(range(1000))
        check = BorderExchange.check

        def look(attempt):
            if self.at_unit is not None:
                self.at_unit(next(numbers))
            check(self.step.borders, attempt)

        self.step.borders.check = look
        return attempt(view, seq)

    def die(self):
        self.loop.call_and_wait(lambda: self.engine._links.close(bye=False), DEADLINE_S)

    def close(self):
        self.engine.close()


class ScriptedJob:
    """Job of scripted members, with methods that act as the scheduler."""

    def __init__(self, net, names, layers_for, make_optimizer, config=None):
        self.parts = parts_of(net)
        self.shared = {p.removeprefix("shared."): its for p, its in self.parts.users.items() if p.startswith("shared.")}
        self.members = [ScriptedMember(self, name, net, layers_for, make_optimizer, config or {}) for name in names]
        self.number = 0

    def view(self, pipelines, members, leaving=(), joiners=()):
        """Returns a view with the next number, in which these members run the given pipelines."""
        self.number += 1
        text = replace(pipelines, shared=self.shared).to_json()
        return View(
            ViewId(1, self.number),
            ViewId(1, self.number - 1),
            tuple(m.member for m in members),
            tuple(m.name for m in joiners),
            plan=PlanSpec("rotating", 16384),
            chain=CHAIN,
            pipelines=text,
            leaving=tuple(m.member for m in leaving),
        )

    def found(self, pipelines):
        self.welcome()
        view = self.view(pipelines, self.members)
        for m in self.members:
            m.found(view)
            m.hear(Decide(view, GENESIS, reason="founded"))
        return view

    def welcome(self):
        """Gives the members their ids, and has them open links to each other."""
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

    def recover(self, pipelines, members):
        """Acts as the scheduler after a death: the remaining members go on in a new view, from the newest header that
        any of them has.
        """
        self.number += 1
        number = ViewId(1, self.number)
        for m in members:
            m.hear(Prepare(number, "somebody died"))
        reports = [next(s for s in reversed(m.said) if isinstance(s, Report)) for m in members]
        assert all(r.number == number for r in reports)
        base = max(reports, key=lambda r: r.seq).last
        self.number -= 1
        view = self.view(pipelines, members)
        for m in members:
            m.hear(Decide(view, base, len({r.head for r in reports}) > 1, reason="the others go on"))
        return view

    def announce(self, pipelines, members, leaving=()):
        """Announces a view to all members, to come into force with the next header; returns the view."""
        view = self.view(pipelines, members, leaving)
        for m in self.members:
            m.hear(NextView(view))
        return view

    def train(self, steps, batches, weights, members=None, meanwhile=lambda: None):
        """Trains all members; returns by name their headers, or the error of a member that died."""
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
        """Returns the parameters by name; checks that all members that have one have equal values."""
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
    """Error with which a member's training thread ends when the member dies."""


class Dying:
    """Staged death: a member dies before a given unit of its own, and `recover` puts the others into new pipelines."""

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
