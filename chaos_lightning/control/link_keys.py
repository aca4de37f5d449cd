"""The scheduler's part of protected links: it makes their keys and hands each member those of its own links.

Theory of operation. A key belongs to a pair of member incarnations and a view; it is derived from a random secret of
this scheduler process, which is kept nowhere else: not in the chain, an event or a status. `KeyIssuer.with_keys` looks
at each message that is about to be sent and puts the keys of the links that it names before it, at both ends: a
newcomer is told whom to open links with (OpenLinks), all members of a view (NextView, Decide). Who is welcomed,
for the first time or again, gets all keys of its links that this process has made.

Another scheduler has another secret. Links that stand need none; one that breaks is made again by a key that both its
ends have, whoever made it; and the next view gives new ones to all. Keys of members that are gone are declared void to
all, also of those that a scheduler before this one let in: it may have died before it could say so.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Collection

from chaos_lightning.membership.topology import Pair, links_of
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Fence,
    LinkKey,
    LinkKeys,
    NextView,
    OpenLinks,
    Settings,
    ToMember,
    View,
    ViewId,
    Welcome,
)
from chaos_lightning.transport.sealing import KEY_NBYTES, Level

_MAX_VOID = 1024
"""Who is welcomed again is told of so many members that are gone, the last ones."""

Messages = list[tuple[int, ToMember]]
"""(number of a member's stream, what to send there)."""


def levels(rule: str, *, secret_channel: bool) -> tuple[Level, Level]:
    """The least protection of links between machines, and within one, that the setting `links` asks for."""
    if rule != "auto":
        return Level(rule), Level(rule)
    return (Level.ENCRYPTED if secret_channel else Level.CHECKSUM), Level.CHECKSUM


class KeyIssuer:
    """See the module.

    Args:
        settings: The job's rules.
        secret_channel: Whether nobody else can read what members are told (credentials.Credentials).
        members: Ids of whoever was in a view of the chain that this scheduler found.
    """

    def __init__(self, settings: Settings, *, secret_channel: bool, members: Collection[str] = ()) -> None:
        self._job = settings.job
        self._rule = settings.links
        self._remote, self._local = levels(settings.links, secret_channel=secret_channel)
        self._keyed = secret_channel or self._local is not Level.CHECKSUM
        self._secret = os.urandom(KEY_NBYTES)
        self._streams: dict[int, str] = {}
        self._view = NO_VIEW
        self._made: dict[Pair, ViewId] = {}
        self._members = set(members)
        """Whose keys members may have, besides those that were made here."""
        self._void: dict[str, None] = {}
        """Who is gone, oldest first."""

    def with_keys(self, number: int, message: ToMember, open_streams: Collection[int]) -> Messages:
        """This message, behind the keys of the links that it names.

        Args:
            number: The stream that it goes to.
            message: What is to be sent.
            open_streams: Those that stand.
        """
        for stream in [s for s in self._streams if s not in open_streams]:
            del self._streams[stream]
        if isinstance(message, Welcome):
            me = message.member.id
            self._streams[number] = me
            self._void.pop(me, None)
            mine = [pair for pair in self._made if me in pair]
            return [(number, message), (number, self._keys_for(me, mine, tuple(self._void)))]
        if not self._keyed:
            return [(number, message)]
        messages: Messages = []
        match message:
            case OpenLinks(peers) if number in self._streams:
                me = self._streams[number]
                messages = self._make([frozenset((me, peer.id)) for peer in peers if peer.id != me])
            case NextView(view) | Decide(view):
                messages = self._turn(view)
            case Fence():
                messages = self._bury([self._streams.pop(number, "")])
        return [*messages, (number, message)]

    def _turn(self, view: View) -> Messages:
        """Each view has keys of its own; they are made when it is first told of."""
        if view.id <= self._view:
            return []
        self._view = view.id
        met = self._members | {m for pair in self._made for m in pair}
        gone = met - set(view.ids()) - set(self._streams.values())
        self._members = set(view.ids())
        for member in view.ids():
            self._void.pop(member, None)
        buried = self._bury(sorted(gone))
        newcomers = [pair for pair in self._made if not pair <= set(view.ids())]
        return [*buried, *self._make([*links_of(view), *newcomers])]

    def _make(self, pairs: Collection[Pair]) -> Messages:
        fresh = [pair for pair in pairs if self._made.get(pair) != self._view]
        self._made.update(dict.fromkeys(fresh, self._view))
        ends = {member for pair in fresh for member in pair}
        streams = {member: stream for stream, member in self._streams.items()}
        return [(streams[m], self._keys_for(m, [p for p in fresh if m in p])) for m in sorted(ends) if m in streams]

    def _bury(self, gone: Collection[str]) -> Messages:
        void = {member for member in gone if member}
        if not void:
            return []
        self._void.update(dict.fromkeys(sorted(void)))
        for member in list(self._void)[:-_MAX_VOID]:
            del self._void[member]
        self._made = {pair: view for pair, view in self._made.items() if not pair & void}
        told = tuple(sorted(void))
        return [(number, self._keys_for(member, (), told)) for number, member in self._streams.items()]

    def _keys_for(self, me: str, pairs: Collection[Pair], void: tuple[str, ...] = ()) -> LinkKeys:
        keys = []
        for pair in pairs:
            (peer,) = pair - {me}
            view = self._made[pair]
            key = self._key(pair, view)
            keys.append(LinkKey(peer, f"{view}-{hmac.digest(key, b'name', 'sha256')[:8].hex()}", key))
        return LinkKeys(self._rule, str(self._remote), str(self._local), self._keyed, tuple(keys), void)

    def _key(self, pair: Pair, view: ViewId) -> bytes:
        what = json.dumps([self._job, *sorted(pair), str(view)]).encode()
        return hmac.digest(self._secret, what, "sha256")
