"""Runs members of a pipeline that have only links, gradients and border tensors, with a `PipelineStep` each."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from border_nodes import DEADLINE_S, BorderNode
from executor_support import SequentialLayers
from until_support import until

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.collectives.reducer import Reducer
from chaos_lightning.errors import AttemptOverError
from chaos_lightning.member.training import reduced_buffers
from chaos_lightning.pipeline.absent import named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.parts import REST, ModelParts
from chaos_lightning.pipeline.step import PipelineStep
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, LinkSpec, PlanSpec, View, ViewId, equal_shares


def parts_of(net):
    """Returns the parts of an `nn.Sequential` whose children are the layers; tied parameters become shared parts."""
    users: dict[int, set[int]] = {}
    for layer, block in enumerate(net):
        for _, _, _, tensor in named_tensors(block):
            users.setdefault(id(tensor), set()).add(layer)
    found = {f"layer.{i}": (i,) for i in range(len(net))} | {REST: tuple(range(len(net)))}
    part_of, first = {}, {}
    for name, _, _, tensor in named_tensors(net):
        its = users[id(tensor)]
        shared = f"shared.{first.setdefault(id(tensor), name)}"
        part_of[name] = shared if len(its) > 1 else f"layer.{min(its)}"
        if len(its) > 1:
            found[shared] = tuple(sorted(its))
    return ModelParts(len(net), part_of, found)


def layers_of(view, member):
    return [layer for stage in view.plan.stages.get(member, ()) for layer in stage.layers]


def owners_of(parts, view, members):
    """Returns the owners of each part, the oldest first."""
    owned = {m: parts.owned_by(layers_of(view, m)) for m in members}
    return {part: [m for m in members if part in owned[m]] for part in parts.users}


class StepMember:
    """Member with links, a `PipelineStep` and a copy of the model, in which only the parts that it owns have memory."""

    def __init__(self, job, name, net, layers_for):
        self.job, self.name = job, name
        self.net = copy.deepcopy(net)
        self.model_memory = ModelMemory(self.net, 1, "cpu")
        self.node = BorderNode(name)
        layout = Layout(
            [Section("all", list(self.net.named_parameters()))], reduced_buffers(self.net), job.parts.part_of
        )
        memory = Memory(layout, 16384, ())
        self.reducer = self.node.chunks = Reducer(memory, self.node.links.chunk, self._done, self._owners)
        self.reducer.restart(name)
        self.accumulation = Accumulation(memory, True, self.node.loop, self.reducer)
        self.step = PipelineStep(
            self.net, layers_for(self.net), self.node.exchange, self.accumulation, job.parts, timeout_s=DEADLINE_S
        )
        self.at_look = None
        """Called with the number of each look at the attempt; may end it, or this member."""
        check = self.node.exchange.check
        self.looks = 0

        def look(attempt):
            self.looks += 1
            if self.at_look is not None:
                self.at_look(self.looks)
            check(attempt)

        self.node.exchange.check = look

    def _done(self, view, seq):
        self.step.reduced(view, seq)

    def _owners(self, view):
        return self.reducer.memory.layout.owned(owners_of(self.job.parts, self.job.pipelines[view.id], view.ids()))

    def own(self, view):
        """Frees the parts that this member does not own in a view."""
        owned = self.job.parts.owned_by(layers_of(view, self.name))
        self.model_memory.leave_out([n for n, part in self.job.parts.part_of.items() if part not in owned])
        self.step.remember_base()

    def attempt(self, attempt, view, number, batches, weights, empty=()):
        self.looks = 0
        self.step.open(attempt, view, self.name, empty)
        return self.step.run(number, batches.__getitem__, weights.__getitem__)

    def end(self, view):
        """Ends the attempts of this and older views, as the I/O thread does in a recovery."""
        self.reducer.drop(view)
        self.node.links.drop(view)
        self.step.end(view)

    def close(self):
        self.accumulation.close()
        self.node.close()


class StepJob:
    """Members of a pipeline with links to each other.

    Args:
        net: The model.
        names: Names of the members, the oldest first.
        layers_for: Makes the layers of a copy of the model.
        parts: Parts of the model.
        links: Pairs of names; none: each pair.
    """

    def __init__(self, net, names, layers_for, parts=None, links=()):
        self.parts = parts or parts_of(net)
        self.pipelines = {}
        self.links = tuple(LinkSpec(*pair) for pair in links)
        self.members = [StepMember(self, name, net, layers_for) for name in names]
        rows = {m.name: m.node.member for m in self.members}
        pairs = {frozenset(pair) for pair in links}
        with ThreadPoolExecutor(len(names)) as pool:
            list(
                pool.map(
                    lambda m: m.node.connect(
                        *(r for n, r in rows.items() if n != m.name and (not links or {n, m.name} in pairs))
                    ),
                    self.members,
                )
            )

    def view(self, number, pipelines, members=None):
        """Returns a view with the given number and members, and registers its pipelines."""
        rows = tuple(m.node.member for m in members or self.members)
        view = View(ViewId(1, number), ViewId(1, number - 1), rows, plan=PlanSpec("rotating", 16384), links=self.links)
        self.pipelines[view.id] = pipelines
        return view

    def run(self, attempt, view, number, batches, weights, empty=(), members=None):
        """Runs an attempt at all members, a thread each; returns by name their contributions, or the error that ended
        the attempt.
        """
        members = members or self.members
        torch.set_num_threads(1)
        for m in members:
            assert m.node.loop.call_and_wait(lambda m=m: m.reducer.open(view, attempt.seq), DEADLINE_S)

        def one(member):
            try:
                return member.attempt(attempt, self.pipelines[view.id], number, batches, weights, empty)
            except AttemptOverError as error:
                return error
            except BaseException:
                self.end(view.id, members)  # the others must not wait for it
                raise

        with ThreadPoolExecutor(len(members)) as pool:
            futures = {m.name: pool.submit(one, m) for m in members}
        return {name: f.result() for name, f in futures.items()}

    def end(self, view, members=None):
        for m in members or self.members:
            m.node.loop.call_and_wait(lambda m=m: m.end(view), DEADLINE_S)

    def commit(self, seq, given, members=None):
        """Makes the header for these contributions and commits it at all members; returns the header."""
        shares = equal_shares((c.weight, 1.0) for c in given.values())
        nbytes = max(len(c.presence) for c in given.values())
        presence = bytes(sum_bits(c.presence[i] for c in given.values() if i < len(c.presence)) for i in range(nbytes))
        header = Header(seq, Kind.STEP, seq, NO_VIEW, "", NO_VIEW, shares=shares, presence=presence)
        for m in members or self.members:
            m.step.commit(header)
        return header

    def close(self):
        for m in self.members:
            m.close()


def sum_bits(values):
    found = 0
    for value in values:
        found |= value
    return found


class Ending:
    """Staged recovery: when one member checks its attempt for the n-th time, the attempt ends at all members.

    The member that looks goes on once the attempt has ended at all of them, so the attempt always ends there.

    Args:
        when: The attempt does not end before this holds.
    """

    def __init__(self, job, member, at, view, when=lambda: True):
        self._when = when
        self._reached, self._ended = threading.Event(), threading.Event()
        self._job, self._view = job, view

        def look(number):
            if number == at:
                self._reached.set()
                assert self._ended.wait(DEADLINE_S)

        self._member = member
        member.at_look = look
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        assert self._reached.wait(DEADLINE_S)
        until(self._when, "what the attempt's end waits for")
        self._job.end(self._view)
        self._ended.set()

    def done(self):
        self._thread.join(DEADLINE_S)
        self._member.at_look = None


def sequential(loss):
    return lambda net: SequentialLayers(net, loss)
