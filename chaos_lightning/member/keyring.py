"""Keeps what a member needs for protected links: the job's rule, and the keys that it shares with other members.

Theory of operation. The scheduler tells rule and keys over the control channel (control/link_keys.py), right after its
welcome and before it names a link. Handshakes run in threads of their own; one that comes a moment before its key is
waited for. Of each peer the last few keys are kept: a link may have to be mended while no scheduler is there, when its
ends may have heard of different views last. Keys live in this object's memory only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from chaos_lightning.errors import ChaosError, RefusedError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.protocol.types import LinkKeys
from chaos_lightning.transport.peer_keys import PeerKeys
from chaos_lightning.transport.sealing import Level, require_library

_log = logging.getLogger("chaos_lightning")

PATIENCE_S = 2.0
"""Seconds for which a key that the other end knows is waited for: the scheduler tells both ends, one a moment
earlier.
"""
KEPT = 4
"""Number of keys that are kept per peer."""


class Keyring:
    """Keys of one member's links; implements `transport.handshake.Keys`. Any thread.

    Args:
        setting: This member's own setting `links`; "auto" follows the job's.
        events: This member's event log.
        mail: Mailbox that tells the training thread that this member cannot take part.
    """

    def __init__(self, setting: str, events: EventLog, mail: Mailbox) -> None:
        self._setting = setting
        self._events = events
        self._mail = mail
        self._noticed = False
        self._changed = threading.Condition()
        self._said: LinkKeys | None = None
        self._keys = PeerKeys(KEPT)
        if setting not in ("auto", Level.CHECKSUM):
            require_library()

    def hear(self, message: LinkKeys) -> None:
        """Takes rule and keys from the scheduler; ejects this member, with the reason, if it cannot follow the rule."""
        if reason := self._objection(message) or self._weakened(message):
            self._mail.post(ejected=(reason, False))
            return
        with self._changed:
            self._said = message
            self._keys.learn([(key.peer, (key.name, key.key)) for key in message.keys], message.void)
            self._changed.notify_all()

    def _objection(self, message: LinkKeys) -> str:
        if self._setting not in ("auto", message.rule):
            return (
                f"links={self._setting} was set here, but the job goes by links={message.rule}, as its scheduler was "
                "started: give all members and the scheduler the same"
            )
        try:
            told = Level(message.remote), Level(message.local)
            if set(told) != {Level.CHECKSUM}:
                require_library()
            if message.rule != "auto" and min(t.strength for t in told) < Level(message.rule).strength:
                return (
                    f"the scheduler says links={message.rule}, and asks for less: {told[0]} between machines, "
                    f"{told[1]} within one; one of its version is needed, or it is not what it says"
                )
        except (ValueError, ChaosError) as error:
            return str(error)
        return ""

    def _weakened(self, message: LinkKeys) -> str:
        """Describes in words by how much a new scheduler protects links less than the one before, which is refused; ""
        if it does not.
        """
        with self._changed:
            before = self._said
        if before is None:
            return ""
        pairs = ((before.remote, message.remote), (before.local, message.local))
        if (message.keyed or not before.keyed) and all(Level(b).strength <= Level(m).strength for b, m in pairs):
            return ""
        return (
            f"links were {_told(before)} when this member came in, and a scheduler now says {_told(message)}: "
            "protection is never lessened while a job runs; give all schedulers the same links and keys"
        )

    def reset(self) -> None:
        """Forgets rule and keys, because this member joins again under another id, for which none of them is valid."""
        with self._changed:
            self._said = None
            self._keys.clear()

    def level(self, *, local: bool) -> Level:
        """Returns the least protection required of a connection, within this machine (`local`) or to another one.

        Raises:
            RefusedError: The scheduler has not said.
        """
        said = self._rule()
        level = Level(said.local if local else said.remote)
        if not local and said.rule == "auto" and level is Level.CHECKSUM:
            self._warn()
        return level

    def known(self, peer: str) -> Sequence[tuple[str, bytes]]:
        """Returns (name, key) of all keys shared with this peer, newest first; a pair of empty values if links have no
        keys.

        Raises:
            RefusedError: There is none.
        """
        if not self._rule().keyed:
            return (("", b""),)
        kept = self._keys.of(peer, PATIENCE_S)
        if not kept:
            raise RefusedError(f"the scheduler has given no key for a link with {peer}")
        return kept

    def find(self, peer: str, names: Sequence[str]) -> tuple[str, bytes] | None:
        """Returns the first of the named keys that this member has, as (name, key)."""
        if not self._rule().keyed:
            return ("", b"")
        return self._keys.find(peer, names, PATIENCE_S)

    def _rule(self) -> LinkKeys:
        with self._changed:
            self._changed.wait_for(lambda: self._said is not None, PATIENCE_S)
            if self._said is None:
                raise RefusedError("the scheduler has not said how links are protected")
            return self._said

    def _warn(self) -> None:
        with self._changed:
            noticed, self._noticed = self._noticed, True
        if noticed:
            return
        text = (
            "links to other machines have checksums only: whoever sits on the way can read and change gradients and "
            "weights. With a folder of keys on all nodes (keys_dir, docs/access.md) they are encrypted, with a token "
            "alone they are not; links=checksum says that this is meant (docs/links.md)"
        )
        self._events.emit("notice", text=text, waiting=False)
        _log.warning(text)


def _told(rule: LinkKeys) -> str:
    keys = "with" if rule.keyed else "without"
    return f"{rule.remote} between machines and {rule.local} within one, {keys} keys"
