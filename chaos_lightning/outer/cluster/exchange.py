"""Exchanges pushes and versions between a cluster and the followers.

Theory of operation. A push that was frozen is encoded beside the training, in a thread that also hashes what is served.
Each incarnation serves its pushes under its own name (push_serving.py), an earlier one for as long as somebody needs
one of them. The version that the cluster wants is fetched in a thread of its own, again and again until it has arrived.
One version is here at a time. The next one may be wanted, and come, before the loop's thread gets to adopt it. So
whoever is about to adopt it takes it away at the moment in which that is settled. Who wants a version is told when it
is served no more, and may want another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from chaos_lightning.errors import ChaosError, NoDonorError
from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.push_serving import PushServing
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.fetching import drop_version, hold_version
from chaos_lightning.outer.rules.cluster import Unpushed
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.outer.rules.types import NO_VERSION, PushId, VersionId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.security.credentials import Secret

AGAIN_S = 0.1
"""Pause before another attempt, s."""
_log = logging.getLogger("chaos_lightning")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt to fetch a version.

    Attributes:
        part: Memory for the version.
        blank: Nothing of the version is there yet.
        abandoned: Whether it is wanted no more.
    """

    part: Part
    blank: bool
    abandoned: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Sought:
    """Version that the cluster wants, and the function that fetches it.

    Attributes:
        version: Number and hash of the version.
        whose: Life of the cluster that wants the version; another one would not take it.
        get: Function that makes an attempt; it raises ChaosError or OSError if the attempt fails.
    """

    version: VersionId
    whose: object
    get: Callable[[Attempt], None]


class VersionGetter:
    """Thread that fetches the wanted version. Methods may be called from any thread.

    Args:
        changed: Notified when what `seek` says may have changed.
        empty: Makes memory for a version.
        seek: Returns the version that is wanted; None if none is. Called with `changed` held.
        missed: Told which version somebody who held a part of it has no more.
        landed: Told which version is here, with `changed` held.
        server: Server from which other processes may get the fetched version; None if they may not.

    Attributes:
        here: Version that was got and not taken.
    """

    def __init__(
        self,
        changed: threading.Condition,
        empty: Callable[[], Part],
        seek: Callable[[], Sought | None],
        missed: Callable[[VersionId], None],
        landed: Callable[[VersionId], None] = lambda version: None,
        server: StateServer | None = None,
    ) -> None:
        self.here: tuple[VersionId, Part] | None = None
        self._changed, self._empty, self._seek, self._server = changed, empty, seek, server
        self._missed, self._landed = missed, landed
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chaos-outer-fetch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(5.0)

    def take(self, version: VersionId) -> Part | None:
        """Returns the fetched version, and forgets it, if it is the named one; else None."""
        with self._changed:
            found = self.here if self.here is not None and self.here[0] == version else None
            if found is not None:
                self.drop()
        return found[1] if found is not None else None

    def drop(self, but: VersionId = NO_VERSION) -> None:
        """Drops the fetched version, unless it is `but`."""
        with self._changed:
            if self.here is None or self.here[0] == but:
                return
            dropped, self.here = self.here, None
            self._changed.notify_all()
        if self._server is not None:
            drop_version(self._server, *dropped)

    def _run(self) -> None:
        part: Part | None = None
        of = NO_VERSION
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closing.is_set() or self._open() is not None)
                sought = self._open()
            if sought is None or self._closing.is_set():
                continue
            if blank := part is None or of != sought.version:
                part, of = self._empty(), sought.version
            try:
                sought.get(Attempt(part, blank, partial(self._abandoned, sought)))
            except (ChaosError, OSError) as error:
                _log.debug("version %s is not here yet: %s", of, error)
                if isinstance(error, NoDonorError) and error.refused:
                    self._missed(of)
                self._closing.wait(AGAIN_S)
                continue
            if self._server is not None:
                hold_version(self._server, of, part)
            with self._changed:
                if not self._abandoned(sought):
                    self.drop()
                    self.here, part = (of, part), None
                    self._landed(of)
                    self._changed.notify_all()
                elif self._server is not None:
                    drop_version(self._server, of, part)

    def _abandoned(self, sought: Sought) -> bool:
        """Returns whether the fetch of this version is of no use any more: another version is wanted or none, or
        another incarnation wants it.
        """
        with self._changed:
            now = self._open()
        return self._closing.is_set() or now is None or now.version != sought.version or now.whose is not sought.whose

    def _open(self) -> Sought | None:
        """Returns the version that is wanted and not fetched yet; None if there is none."""
        sought = self._seek()
        here = sought is not None and self.here is not None and self.here[0] == sought.version
        return None if here else sought


class FollowerExchange:
    """Pushes that a cluster serves, and versions that it fetches. Methods may be called from any thread.

    Args:
        options: Options of the cluster.
        secret: Token or credentials.
        model: Model of the cluster, which keeps the pushes.
        log: Log of the cluster.
        note: Takes events about connections.
        changed: Guards the model's pushes; notified when what `seek` says may have changed.
        me: Returns the name of the cluster's incarnation; the cluster's while it has none.
        getter: Fetches versions.
    """

    def __init__(
        self,
        options: ClusterOptions,
        secret: Secret,
        model: ClusterModel,
        log: OuterLog,
        note: Callable[..., None],
        changed: threading.Condition,
        me: Callable[[], str],
        getter: VersionGetter,
    ) -> None:
        self._options, self._secret, self._note = options, secret, note
        self._model, self._log, self._changed = model, log, changed
        self._getter = getter
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="chaos-outer-encode")
        self._closed = False
        self._generation = 0
        """Counts up when all pushes are forgotten: what was begun before is void."""
        self._serving = self._make(me)
        self._old: list[PushServing] = []
        """Servers of earlier incarnations."""
        self.start, self.take, self.drop = getter.start, getter.take, getter.drop

    def _make(self, me: Callable[[], str]) -> PushServing:
        return PushServing(self._options, self._secret, self._model.grid, me, self._note)

    def anew(self, me: Callable[[], str]) -> None:
        """Serves under the name of a new incarnation from now on; what the one before serves is served on."""
        with self._changed:
            self._old.append(self._serving)
            self._serving = self._make(me)
            self._let_go()

    # ------------------------------------------------------------------ pushes

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Followers that hold the shards, in shard order."""
        return self._serving.holders

    @holders.setter
    def holders(self, holders: tuple[Holder, ...]) -> None:
        self._serving.holders = holders

    def reach(self, holders: tuple[Holder, ...]) -> None:
        """Lets the followers that hold the shards from now on fetch all pushes."""
        with self._changed:
            for serving in (self._serving, *self._old) if not self._closed else ():
                serving.reach(holders)
        self.serve()

    def serve(self) -> None:
        """Serves all pushes, cut as the followers' present shards are. They are hashed in the encoding thread."""
        with self._changed:
            if not self._closed:
                self._worker.submit(self._serve_all, self._generation)

    def _serve_all(self, generation: int) -> None:
        with self._changed:
            if generation != self._generation:
                return  # memory for other pushes may be there already
            names = {serving.me(): serving for serving in self._old}
            shares: dict[PushServing, dict[PushId, Part]] = {}
            for push, part in self._model.pushes.items():
                shares.setdefault(names.get(str(push.incarnation), self._serving), {})[push] = part
        for serving, pushes in shares.items():
            serving.serve(pushes)  # without the lock that `boundary` takes
            with self._changed:
                for push in pushes.keys() - self._model.pushes.keys():  # freed meanwhile
                    serving.drop(push)

    def encode(
        self,
        push: PushId,
        base: VersionId,
        covered: Unpushed,
        *,
        wanted: Callable[[], bool],
        done: Callable[[Part, str], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        """Encodes the push that was frozen last, and serves it.

        Args:
            push: Name of the push.
            base: Base of the push.
            covered: Training that it covers.
            wanted: Returns whether the push is still wanted.
            done: Takes the push and the hash of its blocks, once it is served; returns whether it is still wanted.
            failed: Takes the error of a push that is still wanted.
        """
        began, serving, encode = time.monotonic(), self._serving, self._model.encoder()
        generation = self._generation

        def void() -> bool:
            return generation != self._generation or not wanted()

        def work() -> None:
            try:
                part = encode()
                manifest = part.hash
                if void():
                    return
                serving.serve({push: part})
            except Exception as error:
                if not void():  # else its content is gone
                    failed(error)
                return
            self._log.tell(
                "push_frozen",
                push=str(push),
                base=str(base),
                steps=covered.steps,
                samples=covered.samples,
                nbytes=part.data.numel(),
                seconds=round(time.monotonic() - began, 6),
                manifest=manifest,
            )
            if void() or not done(part, manifest):
                serving.drop(push)

        with self._changed:
            if not self._closed:
                self._worker.submit(work)

    def free(self, push: PushId) -> None:
        """Serves a push no more, and forgets it."""
        with self._changed:
            self._model.pushes.pop(push, None)
            for serving in (self._serving, *self._old):
                serving.drop(push)
            self._let_go()

    def forget(self) -> None:
        """Forgets all pushes, and what is being encoded: this process gets the state of others."""
        with self._changed:
            self._generation += 1
            for push in list(self._model.pushes):
                self.free(push)

    def _let_go(self) -> None:
        """Closes the servers of earlier incarnations whose pushes nobody needs any more."""
        needed = {str(push.incarnation) for push in self._model.pushes}
        done = [serving for serving in self._old if serving.me() not in needed]
        self._old = [serving for serving in self._old if serving not in done]
        for serving in done:
            threading.Thread(target=serving.close, name="chaos-outer-close", daemon=True).start()

    def share(self, ranks: int) -> None:
        """Divides the cluster's sending rate by the number of ranks, which all serve the same pushes."""
        self._serving.share(ranks)

    # ------------------------------------------------------------------ versions

    @property
    def here(self) -> tuple[VersionId, Part] | None:
        """Version that was fetched and not taken; None if there is none."""
        return self._getter.here

    def look(self) -> None:
        """Wakes the thread that fetches, since another version may be wanted."""
        with self._changed:
            self._changed.notify_all()

    def fetch(self, version: VersionId, attempt: Attempt) -> None:
        """Fills `attempt.part` with a version from the followers; errors are those of `PushServing.fetch`."""
        began = time.monotonic()
        nbytes = self._serving.fetch(version, attempt.part, attempt.abandoned, blank=attempt.blank)
        seconds = round(time.monotonic() - began, 6)
        who = self._log.who()
        self._log.tell("version_fetched", version=str(version), nbytes=nbytes, seconds=seconds, incarnation=who)

    def close(self) -> None:
        """Ends all threads and connections."""
        with self._changed:
            self._closed = True
        for serving in (self._serving, *self._old):
            serving.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._getter.close()
