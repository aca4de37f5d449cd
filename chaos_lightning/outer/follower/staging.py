"""Stages pushes at a follower: fetches its shard's piece of each, verifies it, computes its products with other pushes,
and keeps it until told to forget it.

Theory of operation. Each push has a thread while it is fetched, and a few of them fetch at a time. All processes of its
cluster that have connections parked send parts of it. What has arrived
stays over connections and attempts. An attempt ends where nothing comes any more; the machine then says whether to try
again, and the memory is kept until it says no.

A part that is here is measured before it counts as staged, one at a time, so that of each two pushes one has the
product with the other. Left out are products with pushes that are decided already, for these are in no window any more.
(After a rollback they are, without these products: the leader takes them for 0.) Blocks of reduced buffers are left
out, too. A push that is decided already when it comes, such as after a restart, is staged at once and measured later.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from chaos_lightning.errors import ChaosError, WireError
from chaos_lightning.outer.exchange.codec import Codec, Part, codec_of
from chaos_lightning.outer.exchange.fetching import fetch_push
from chaos_lightning.outer.exchange.kernel import OuterState, products
from chaos_lightning.outer.rules.effects import FollowerEvent, NotFetched, Progressed
from chaos_lightning.outer.rules.exact import ExactSum
from chaos_lightning.outer.rules.grid import Grid, Shard
from chaos_lightning.outer.rules.messages import PushProduct
from chaos_lightning.outer.rules.types import Agreement, Offer, PushId
from chaos_lightning.protocol.types import Progress
from chaos_lightning.replication.source import Endpoint

AT_ONCE = 8
"""Number of fetches at a time."""
ATTEMPT_S = 600.0
"""Longest time, s, of an attempt, however steadily bytes come."""
AGAIN_S = 0.5
"""Pause, s, between two attempts for one push."""
LATER_S = 2.0
"""Seconds after which a decided push is measured: the fetches that it takes to compute versions again come first."""
TELL_S = 0.3
"""Interval, s, at which it is told when a push will be here."""


@dataclass(frozen=True)
class HeldShard:
    """Shard that a follower holds, and the codec of its job.

    Attributes:
        shard: Blocks of the shard.
        averaged: Index of the shard's first block that belongs to reduced buffers.
        codec: Formats of pushes and versions.
    """

    shard: Shard
    averaged: int
    codec: Codec

    @classmethod
    def of(cls, agreement: Agreement, shard: int, shards: int) -> HeldShard:
        """Returns shard number `shard` of `shards`, for a job with this agreement.

        Raises:
            ConfigurationError: There are fewer blocks than shards, or no such codec.
        """
        sizes = tuple(tensor.elements for tensor in agreement.tensors)
        mine = Grid(sizes, agreement.block).cut(shards)[shard]
        return cls(mine, mine.since(len(sizes) - agreement.averaged), codec_of(agreement))

    def product(self, one: Part, other: Part) -> str:
        """Returns the scalar product of two parts, over the blocks of parameters; WireError if one has malformed
        bytes.
        """
        return ExactSum.of(products(one, other, self.averaged)).encode()

    def lean(self, push: Part, state: OuterState) -> str:
        """Returns a push's scalar product with the momentum, <D, m>; if pushes hold parameters f, <theta, theta> - 2
        <theta, f>.

        With the latter the leader has <theta - f_j, theta - f_k> from <f_j, f_k> at each version (rounds.py).
        """
        if not self.codec.parameters:
            return self.product(push, Part.of(state.shard, state.momentum))
        theta = Part.of(state.shard, state.theta)
        crossed = products(theta, push, self.averaged)
        return ExactSum.of([*products(theta, theta, self.averaged), *(-2 * each for each in crossed)]).encode()


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """Piece of a push that has been fetched, with its scalar products.

    Attributes:
        offer: Offer of the push.
        part: Bytes of the piece.
        products: Scalar products with itself and with the pushes that were here before.
        finite: Whether all its elements are finite.
    """

    offer: Offer
    part: Part
    products: tuple[PushProduct, ...]
    finite: bool


class Lines(Protocol):
    """Connections to the processes that serve a push; `lines.DataListener` implements it."""

    def donors(self, peer: str) -> list[Endpoint]:
        """Returns the endpoints of this incarnation's processes."""

    def dial(self, endpoint: Endpoint) -> socket.socket:
        """Returns a connection to one of the processes that serve a push; has the signature of
        `replication.source.Dial`.
        """


class StagedPushes:
    """Pushes whose pieces a follower fetches and keeps. Methods may be called from any thread.

    Args:
        lines: Connections to pushes' clusters.
        post: Takes events for the machine.
        measured: Takes parts that are here, in a thread of this object.
        note: Writes an event.
        failed: Takes an error after which this process cannot go on.
    """

    def __init__(
        self,
        lines: Lines,
        post: Callable[[FollowerEvent], None],
        measured: Callable[[MeasuredPart], None],
        note: Callable[..., None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._lines, self._post, self._measured, self._note, self._failed = lines, post, measured, note, failed
        self._held: HeldShard | None = None
        self._lock = threading.Lock()
        self._parts: dict[PushId, Part] = {}
        self._arriving: dict[PushId, tuple[Part, Counter[str]]] = {}
        """Parts that are not whole, each with the bytes that were verified of it, by source."""
        self._decided: Collection[PushId] = ()
        self._broken: set[PushId] = set()
        """Pushes whose parts are not finite, or malformed."""
        self._reasons: dict[PushId, str] = {}
        """Reasons for which pushes were not fetched, as told last."""
        self._most: tuple[int, ...] = (0, 0)
        """Largest numbers of pushes held at once since they were told last: of all clusters, and of one incarnation."""
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        self._measuring = threading.Lock()
        self._closing = threading.Event()

    def hold(self, held: HeldShard) -> None:
        """Sets the shard whose pieces of pushes are fetched from now on."""
        self._held = held

    def fetch(self, offer: Offer) -> None:
        """Starts an attempt to fetch a push's piece; its outcome is a call of `measured`, or the event NotFetched."""
        threading.Thread(target=self._fetch, args=(offer,), name="chaos-follower-fetch", daemon=True).start()

    def decide(self, pushes: Collection[PushId]) -> None:
        """Sets which pushes are decided by a round; all others count as undecided."""
        with self._lock:
            self._decided = pushes

    def part(self, push: PushId) -> Part:
        """Returns the fetched piece of a push."""
        with self._lock:
            return self._parts[push]

    def open(self) -> list[tuple[PushId, Part]]:
        """Returns the fetched pieces of pushes that are finite and undecided, in the order of the pushes' names."""
        with self._lock:
            left_out = self._broken.union(self._decided)
            return sorted(
                ((push, part) for push, part in self._parts.items() if push not in left_out), key=lambda pair: pair[0]
            )

    def forget(self, push: PushId) -> None:
        """Drops the bytes of a push, which nobody needs any more."""
        with self._lock:
            for table in (self._parts, self._arriving, self._reasons):
                table.pop(push, None)
            self._broken.discard(push)

    def close(self) -> None:
        """Stops all attempts to fetch pushes, without reporting their outcome."""
        self._closing.set()

    # ------------------------------------------------------------------ in a thread of a push

    def _fetch(self, offer: Offer) -> None:
        try:
            assert self._held is not None
            self._get(self._held, offer)
        except BaseException as error:
            self._failed(error)

    def _get(self, held: HeldShard, offer: Offer) -> None:
        push, began = offer.push, time.monotonic()
        with self._lock:
            arriving = self._arriving.get(push)
            if first := arriving is None:
                part = Part.empty(held.shard, held.codec.format_of(offer.base))
                arriving = self._arriving[push] = part, Counter()
                self._most = tuple(map(max, self._most, self._count()))
        part, sources = arriving
        with self._slots:
            reason = self._attempts(offer, part, sources, first=first)
        if not reason:
            seconds = round(time.monotonic() - began, 4)
            with self._lock:
                (most, of_one), self._most = self._most, self._count()
            told = {"nbytes": part.data.numel(), "seconds": seconds, "held": most, "held_of_one": of_one}
            self._note("push_staged", push=str(push), sources=sources, **told)
            if push in self._decided:
                self._keep(push, part, finite=True)  # else it would not have been accepted
                self._measured(MeasuredPart(offer, part, (), True))
                if self._closing.wait(LATER_S) or not self._holds(push):
                    return
            self._measure(held, offer, part)
            return
        with self._lock:
            news, self._reasons[push] = self._reasons.get(push) != reason, reason
        if news:
            self._note("push_not_fetched", push=str(push), reason=reason)
        if not self._closing.wait(AGAIN_S):
            self._post(NotFetched(push))

    def _attempts(self, offer: Offer, part: Part, sources: Counter[str], *, first: bool) -> str:
        """Fetches a piece, and tries again as long as bytes arrive; returns "" once it is complete, else why not.
        Counts verified bytes by source.

        `first`: nothing of it is here yet.
        """
        told_at, moved = time.monotonic(), True
        so_far: dict[str, int] = {}

        def tell(progress: Progress) -> None:
            nonlocal told_at, moved
            moved = True
            so_far.update((each.member, each.nbytes) for each in progress.sources)  # who is gone stays in it
            if time.monotonic() - told_at > TELL_S and math.isfinite(progress.remaining_s):
                told_at = time.monotonic()
                self._post(Progressed(offer.push, progress.remaining_s))

        reason, blank = "this follower ends", first
        while moved and not self._closing.is_set():
            moved = False
            donors = self._lines.donors(str(offer.push.incarnation))
            try:
                fetch_push(
                    offer, part, self._lines.dial, deadline_s=ATTEMPT_S, donors=donors, progress=tell, blank=blank
                )
                return ""
            except (ChaosError, OSError) as error:
                reason, blank = str(error), False
            finally:
                sources.update(so_far)
                so_far.clear()
        return reason

    def _count(self) -> tuple[int, int]:
        held = Counter(push.incarnation for push in self._parts.keys() | self._arriving.keys())
        return held.total(), max(held.values(), default=0)

    def _holds(self, push: PushId) -> bool:
        with self._lock:
            return push in self._parts

    def _keep(self, push: PushId, part: Part, *, finite: bool) -> None:
        with self._lock:
            self._arriving.pop(push, None)
            self._reasons.pop(push, None)
            self._parts[push] = part
            if not finite:
                self._broken.add(push)

    def _measure(self, held: HeldShard, offer: Offer, part: Part) -> None:
        push = offer.push
        with self._measuring:
            found: list[PushProduct] = []
            try:
                mine = products(part, part)
                finite = all(map(math.isfinite, mine))
            except WireError:
                finite = False  # nobody can add it to anything, so it must be refused
            if finite:
                found.append(PushProduct(push, ExactSum.of(mine[: held.averaged]).encode()))
                others = [pair for pair in self.open() if pair[0] != push]
                found += [PushProduct(other, held.product(part, its)) for other, its in others]
            self._keep(push, part, finite=finite)
        self._measured(MeasuredPart(offer, part, tuple(found), finite))
