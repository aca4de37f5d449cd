"""Makes the keys of protected links in the scheduler, and gives each member those of its own links.

Theory of operation. A key (service/keys.py) belongs to a pair of member incarnations and a view. `KeyIssuer.with_keys`
looks at each message that is about to be sent and puts the keys of the links that it names before it, at both ends: a
newcomer is told whom to open links with (OpenLinks), all members of a view (NextView, Decide). Who is welcomed, for the
first time or again, gets all keys of its links that this process has made.

Another scheduler has another secret, and the next view gives new keys to all. Keys of members that are gone are
declared void to all, also of those that a scheduler before this one let in: it may have died before it could say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from chaos_lightning.membership.topology import links_of
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
from chaos_lightning.service.keys import KeyMaker, levels
from chaos_lightning.transport.sealing import Level

_MAX_VOID = 1024
"""Largest number of members that are gone, the last ones, of which a member is told that is welcomed again."""

Messages = list[tuple[int, ToMember]]
"""(number of a member's stream, what to send there)."""


class KeyIssuer:
    """Issues the keys that a scheduler makes for links between its members.

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
        self._maker = KeyMaker()
        self._members_at: dict[int, str] = {}
        """Member of each stream."""
        self._stream_of: dict[str, int] = {}
        self._view = NO_VIEW
        self._made: defaultdict[str, dict[str, ViewId]] = defaultdict(dict)
        """View for which the key of a link was made last, by member and peer, both ways."""
        self._members = set(members)
        """Members whose keys others may have, besides those that were made here."""
        self._void: dict[str, None] = {}
        """Members that are gone, oldest first."""

    def closed(self, number: int) -> None:
        """Forgets a member's stream that has ended."""
        me = self._members_at.pop(number, "")
        if self._stream_of.get(me) == number:
            del self._stream_of[me]

    def with_keys(self, number: int, message: ToMember) -> Messages:
        """Returns the messages to send: keys of new links first, each to its two members, and then `message`.

        Args:
            number: Number of the stream that the message goes to.
            message: Message to send.
        """
        if isinstance(message, Welcome):
            me = message.member.id
            self._members_at[number], self._stream_of[me] = me, number
            self._void.pop(me, None)
            mine = [self._key(me, peer, view)[1] for peer, view in self._made.get(me, {}).items()]
            return [(number, message), (number, self._told(mine, tuple(self._void)))]
        if not self._keyed:
            return [(number, message)]
        messages: Messages = []
        match message:
            case OpenLinks(peers) if number in self._members_at:
                me = self._members_at[number]
                messages = self._make([(me, peer.id) for peer in peers if peer.id != me])
            case NextView(view) | Decide(view):
                messages = self._turn(view)
            case Fence():
                me = self._members_at.get(number, "")
                self.closed(number)
                messages = self._bury([me])
        return [*messages, (number, message)]

    def _turn(self, view: View) -> Messages:
        """Returns messages with the keys for the links of a new view, each made when the view is first sent."""
        if view.id <= self._view:
            return []
        self._view = view.id
        ids = set(view.ids())
        gone = (self._members | self._made.keys()) - ids - self._stream_of.keys()
        self._members = ids
        for member in ids:
            self._void.pop(member, None)
        buried = self._bury(sorted(gone))
        newcomers = [(me, peer) for me in self._made.keys() - ids for peer in self._made[me]]
        return [*buried, *self._make([*links_of(view), *newcomers])]

    def _make(self, pairs: Iterable[Collection[str]]) -> Messages:
        """Makes keys for those links that have none of the present view; returns a message for each connected end."""
        told: dict[str, list[LinkKey]] = {}
        for a, b in pairs:
            if self._made[a].get(b) == self._view:
                continue
            self._made[a][b] = self._made[b][a] = self._view
            if a in self._stream_of or b in self._stream_of:
                its, mine = self._key(a, b, self._view)
                told.setdefault(a, []).append(mine)
                told.setdefault(b, []).append(its)
        return [(self._stream_of[m], self._told(told[m])) for m in sorted(told) if m in self._stream_of]

    def _bury(self, gone: Collection[str]) -> Messages:
        void = {member for member in gone if member}
        if not void:
            return []
        self._void.update(dict.fromkeys(sorted(void)))
        for member in list(self._void)[:-_MAX_VOID]:
            del self._void[member]
        for member in void:
            for peer in self._made.pop(member, {}):
                self._made[peer].pop(member, None)
        told = self._told((), tuple(sorted(void)))
        return [(number, told) for number in self._members_at]

    def _told(self, keys: Collection[LinkKey], void: tuple[str, ...] = ()) -> LinkKeys:
        return LinkKeys(self._rule, str(self._remote), str(self._local), self._keyed, tuple(keys), void)

    def _key(self, a: str, b: str, view: ViewId) -> tuple[LinkKey, LinkKey]:
        """Returns the key of a link twice: as told to member `b`, and as told to member `a`."""
        name, key = self._maker.key(self._job, *sorted((a, b)), str(view))
        name = f"{view}-{name}"
        return LinkKey(a, name, key), LinkKey(b, name, key)
