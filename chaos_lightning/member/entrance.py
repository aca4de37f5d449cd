"""Brings a member from its hello into a view, by waiting, observing and pulling; runs in the training thread.

Theory of operation. The I/O thread leaves in the mailbox what was decided about this newcomer: a view it founds, a
header to observe from, or a header at which it is let in and pulls the state. These come in any order and any number
(the job may lose members meanwhile), so `enter` is a loop over the mailbox that ends with a state or with an error.

A pull that was begun and not ended leaves a mixture (`Transfer.mixed`), also over `Engine.rejoin`: a member with that
may get a state from others, but founds no job.

Where steps run as units, `state` is the rest of the training state, which is pulled as the parts that this member owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chaos_lightning.collectives.accumulation import Accumulation
from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.observing import Observation
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.transfer import Transfer
from chaos_lightning.member.unit_steps import MovesParts
from chaos_lightning.member.waiting import ADVICE
from chaos_lightning.membership import effects as fx
from chaos_lightning.protocol.types import GENESIS, Header, View
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.replay import Replay
from chaos_lightning.settings import EngineConfig


def no_replay(config: EngineConfig, replay: Replay | None) -> str:
    """Returns the reason why this member cannot join by replay; "" if it can.

    Raises:
        ConfigurationError: The settings ask for replay, and this member cannot.
    """
    name = config.name
    if config.join_by == "pause":
        return f"{name} was told to join by pause"
    reason = "it was not told how its steps are replayed" if replay is None else replay.replayable()
    if reason and config.join_by == "replay":
        raise ConfigurationError(f"join_by='replay' is not possible for {name}: {reason}; use 'auto' or 'pause'")
    return reason


@dataclass(frozen=True, slots=True)
class Arrival:
    """Result of entering: the role, the header and the view with which a member joined."""

    role: str
    header: Header
    view: View


@dataclass(eq=False)
class Entrance:
    """Procedure by which one member enters a view.

    Attributes:
        shell: Shell that is told when the state is here.
        mail: Mailbox with the decisions about this newcomer.
        transfer: Pulls the state.
        accumulation: Turns logged sums into gradients.
        load: Brings a state that was kept at this header (protocol.md 14c).
        moves: Pulls parts, if steps run as units.
    """

    shell: Shell
    mail: Mailbox
    transfer: Transfer
    accumulation: Accumulation
    load: Callable[[Header, StateAccess], None]
    moves: MovesParts | None = None

    def enter(self, state: StateAccess, replay: Replay | None, deadline: float) -> Arrival | None:
        """Waits until this member is in a view, and fetches the state if need be; returns None if it was told to leave.

        Raises:
            FencedError, RefusedError, DepartedError, DeadlineError, StateError: See errors.py.
            ConfigurationError: The job has pipelines and this member runs no units, or the other way round.
        """
        mail = self.mail
        begun: fx.PullState | None = None  # where parts of the state are pulled, each of which is told of as it comes
        while True:
            with mail.changed:
                mail.wait(
                    lambda: (
                        mail.giving_up or mail.pull is not None or mail.view is not None or mail.observe is not None
                    ),
                    "admission to the job",
                    deadline,
                    ADVICE,
                )
                if mail.giving_up:
                    return None
                pull, mail.pull = mail.pull, None
                (observe, mail.observe), me = (mail.observe, None), mail.who()
                view = mail.view
                first = pull is not None and (begun is None or begun.header.hash != pull.header.hash)
                if pull is not None and self.moves is not None:
                    begun = pull
                    mail.parts = mail.parts or fx.PullParts(pull.header, pull.view, pull.parts)
                if begun is not None:
                    mail.check()
                lacks = mail.parts
            if begun is not None and self.moves is not None:
                # Maybe a decision has it go on meanwhile, at the same header, with what it has got so far (P10).
                self._check(view or begun.view)
                self.transfer.mixed = f"step {begun.header.step}"
                if first and self.shell.machine.parts.in_file(begun.header, begun.view):
                    self.load(begun.header, state)  # a founding that its file came late for (P13)
                if lacks is None or self.moves.pull(lacks, deadline):
                    return self._joined(begun, view or begun.view, state)
            elif pull is not None:
                self._check(pull.view)
                if self.transfer.fetch(pull.header, pull.view, state, deadline):
                    return self._joined(pull, pull.view, state)
            elif view is None:
                assert observe is not None
                if replay is not None:
                    observation = Observation(
                        self.transfer,
                        mail,
                        self.shell.events,
                        self.accumulation,
                        replay,
                        self.shell.to_scheduler,
                        me,
                    )
                    observation.run(*observe, state, deadline)
            elif self.transfer.mixed and mail.who() not in view.joiners:
                # Those whose state it was about to take are gone, and what lies here is neither theirs nor its own.
                raise StateError(
                    f"{mail.who()} would found the job again, but its state is a mixture: it was getting that of "
                    f"{self.transfer.mixed}, and all members that had it are gone; start this process again (torchrun "
                    "does so by itself with --max-restarts)"
                )
            elif mail.who() in view.joiners:
                with mail.changed:
                    mail.wait(lambda: mail.giving_up or mail.pull is not None, "the state's header", deadline)
            else:
                self._check(view)
                self.transfer.arrived()
                base = self.shell.machine.header
                if base != GENESIS:
                    self.load(base, state)
                if self.moves is None:
                    self.transfer.publish(base, state, self.accumulation.layout)
                return Arrival("founder", base, view)

    def _joined(self, pull: fx.PullState, view: View, state: StateAccess) -> Arrival:
        """Completes the entrance of a newcomer that now has all the state at the header."""
        self.transfer.mixed = ""
        self.transfer.arrived()
        if self.moves is None:
            # Its donors may die before the next slot: then it is the one that others get this state from.
            self.transfer.publish(pull.header, state, self.accumulation.layout)
            loaded = fx.StateLoaded(pull.header.hash, pull.parts, pull.view.id)
            self.shell.loop.call(partial(self.shell.feed, loaded))
        return Arrival("joiner", pull.header, view)

    def _check(self, view: View) -> None:
        if (self.moves is not None) == bool(view.pipelines):
            return
        has = "pipelines, and this member does not run" if view.pipelines else "no pipelines, and this member runs"
        raise ConfigurationError(
            f"view {view.id} has {has} its steps as units of micro-batches; start all members and the scheduler with "
            "the same settings"
        )
