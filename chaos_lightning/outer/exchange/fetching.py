"""Serves, fetches and verifies pushes and versions, each shard of them as a named state of `replication/`.

Theory of operation. Each shard of a content is a state of its own, whose bytes are a slice of the whole's. So ranges
resume, are verified on arrival and skipped where they are here already: who tries again keeps the same memory. Who
holds a push is its cluster, and the follower asks on a connection that the cluster has parked; who holds a version are
the followers, and a cluster asks all of them at once.

A push's manifest has the digests of all its blocks. They must hash to what the offer says, before a byte is fetched,
and each block of the part must have its digest: other bytes under a push's name are refused (docs/outer.md, O3). So
that a push is hashed once, at either end, its blocks are the pieces by which a state is verified: each tensor's part is
a tensor of the state, as no block crosses a border between tensors, and is cut into pieces of a block's size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from chaos_lightning.errors import DeadlineError, NoDonorError, WireError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.outer.exchange.codec import Format, Part
from chaos_lightning.outer.rules.grid import Shard
from chaos_lightning.outer.rules.messages import Holder
from chaos_lightning.outer.rules.types import Offer, PushId, VersionId
from chaos_lightning.replication.bulk import named_head
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.policy import SharedQueue
from chaos_lightning.replication.pull import pull_state
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.session import Tell
from chaos_lightning.replication.source import Dial, Endpoint
from chaos_lightning.replication.table import DIGEST_NBYTES, PIECE_NBYTES, StateTable

STALL_S = 3.0
"""Seconds without a byte after which a connection is given up, and another one is tried."""
GRACE_S = 0.25
"""Seconds for which processes that have answered wait for one that has not; it may join them later."""
_DIGESTS = "digests"

Check = Callable[[Mapping[str, Any], StateTable], None]
"""Check of manifest and table before anything is fetched. After a WireError the donor is out, after another error the
fetch.
"""


def push_name(push: PushId, shard: Shard) -> str:
    """Returns the name under which a push's piece in this shard is served."""
    return f"push {push} [{shard.first}, {shard.stop})"


def version_name(version: VersionId, shard: Shard, format: str) -> str:
    """Returns the name under which a version's piece in this shard is served, in this format."""
    return f"version {version.number} {version.hash} {format} [{shard.first}, {shard.stop})"


def hold_push(server: StateServer, push: PushId, whole: Part, shards: Sequence[Shard]) -> str:
    """Serves a push until `drop_push`; its bytes must not change. Returns the manifest hash, which the push's offer
    contains.
    """
    digests = whole.digests()
    manifest = {_DIGESTS: b"".join(digests)}
    for shard in shards:
        runs = [(shard.first + first, shard.first + stop) for first, stop in shard.runs()]
        server.hold(
            push_name(push, shard),
            0,
            _named(whole.run(first, stop) for first, stop in runs),
            manifest,
            ready=True,
            hashes=[tuple(digests[first:stop]) for first, stop in runs],
            piece_nbytes=whole.block_nbytes,
        )
    return whole.shard.content_hash(digests, whole.format.name)


def drop_push(server: StateServer, push: PushId, shards: Sequence[Shard]) -> None:
    """Stops serving a push, in these shards."""
    for shard in shards:
        server.drop(push_name(push, shard))


def hold_version(server: StateServer, version: VersionId, part: Part) -> None:
    """Serves a follower's shard of a version until `drop_version`; its bytes must not change."""
    server.hold(version_name(version, part.shard, part.format.name), 0, _named([part.data]), {}, ready=True)


def drop_version(server: StateServer, version: VersionId, part: Part) -> None:
    """Stops serving a follower's shard of a version."""
    server.drop(version_name(version, part.shard, part.format.name))


def _named(data: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns these tensors with their names, which are their numbers."""
    return [(str(number), each) for number, each in enumerate(data)]


class _Bytes:
    """State that consists of bytes in memory alone; implements `replication.access.StateAccess`."""

    def __init__(self, data: Sequence[Tensor], check: Check | None) -> None:
        self._data, self._check = data, check

    def tensors(self) -> list[tuple[str, Tensor]]:
        return _named(self._data)

    def manifest(self) -> dict[str, object]:
        return {}

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        if self._check is not None:
            self._check(manifest, table)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        """Does nothing: the fetched bytes are the whole state."""


def fetch(
    name: str,
    donors: Sequence[Endpoint],
    dial: Dial,
    data: Sequence[Tensor],
    *,
    deadline_s: float,
    progress: Tell | None = None,
    check: Check | None = None,
    abandoned: Callable[[], bool] | None = None,
    blank: bool = False,
    piece_nbytes: int = PIECE_NBYTES,
) -> None:
    """Fills `data` with a state's bytes; bytes that an earlier attempt fetched are not fetched again.

    Args:
        name: Name of the state.
        donors: Endpoints of the processes that have the state; each sends a part.
        dial: Makes a connection to a donor, or takes one that it has parked.
        data: Tensors of the state, each uint8, flat, contiguous, in host memory; after an error they hold a mixture,
            which the next try goes on from.
        deadline_s: Seconds for the whole transfer.
        progress: Told the number of bytes that arrived.
        check: Looks at manifest and table before anything is fetched.
        abandoned: Asked now and then; True ends the transfer.
        blank: Whether nothing is here yet, so that nothing need be looked for.
        piece_nbytes: Size, in bytes, of the pieces that are verified, as the donor cuts them.

    Raises:
        NoDonorError: No donor has it, or can be reached (any more).
        StateError: The state that a donor has does not fit, or the transfer was abandoned.
        DeadlineError: The deadline passed.
    """
    config = PullConfig(
        deadline_s=deadline_s,
        stall_timeout_s=STALL_S,
        redial_s=0.0,
        survey_grace_s=GRACE_S,
        redial_silent=len(donors) == 1,  # else the others go on at once
        prove=False,  # each piece was verified where it lies
        blank=blank,
        piece_nbytes=piece_nbytes,
    )
    pull_state(
        donors,
        dial,
        head=named_head(name),
        seq=0,
        state=_Bytes(data, check),
        config=config,
        policy=SharedQueue() if len(donors) > 1 else None,  # nothing comes twice over a link that all of them share
        progress=progress,
        abandoned=abandoned,
    )


def fetch_push(
    offer: Offer,
    part: Part,
    dial: Dial,
    *,
    deadline_s: float,
    donors: Sequence[Endpoint] = (),
    progress: Tell | None = None,
    blank: bool = False,
) -> None:
    """Fills a follower's piece of a push from the cluster that offers it; arguments and errors are those of `fetch`.

    Args:
        offer: Offer of the push, which says what its content must be.
        part: Memory for the piece.
        dial: Takes a connection that the cluster has parked (lines.DataListener.dial).
        deadline_s: Seconds for the whole transfer.
        donors: Processes of that cluster (lines.DataListener.donors); none: any that has parked a connection.
        progress: Told the number of bytes that arrived.
        blank: See `fetch`.

    Raises:
        NoDonorError: No process serves the offered push (any more), or its bytes are not those that were offered.
    """
    shard = part.shard

    def check(manifest: Mapping[str, Any], table: StateTable) -> None:
        digests = manifest.get(_DIGESTS)
        if not isinstance(digests, bytes) or len(digests) != shard.grid.blocks * DIGEST_NBYTES:
            raise WireError(f"push {offer.push} comes without one digest for each of {shard.grid.blocks} blocks")
        offered = [digests[at : at + DIGEST_NBYTES] for at in range(0, len(digests), DIGEST_NBYTES)]
        found = shard.grid.whole.content_hash(offered, part.format.name)
        if found != offer.manifest:
            raise WireError(f"push {offer.push} was offered as {offer.manifest}, and what is served is {found}")
        if [digest for entry in table.entries for digest in entry.hashes] != offered[shard.first : shard.stop]:
            raise WireError(f"push {offer.push} is served with other digests of its blocks than those offered")

    name = push_name(offer.push, shard)
    whom = donors or [Endpoint(str(offer.push.incarnation), "", 0)]
    data = [part.run(first, stop) for first, stop in shard.runs()]
    fetch(
        name,
        whom,
        dial,
        data,
        deadline_s=deadline_s,
        progress=progress,
        check=check,
        blank=blank,
        piece_nbytes=part.block_nbytes,
    )


def fetch_version(
    version: VersionId,
    shards: Sequence[Shard],
    format: Format,
    holders: Sequence[Holder],
    part: Part,
    dial: Dial,
    *,
    deadline_s: float,
    progress: Tell | None = None,
    abandoned: Callable[[], bool] = lambda: False,
    blank: bool = False,
) -> int:
    """Fills `part` with a whole version, from all followers at once.

    Args:
        version: Version to fetch.
        shards: Shards into which the grid is cut.
        format: Format of the version.
        holders: Followers that hold the shards, in the order of `shards`.
        part: Memory for the whole grid, in that format; after an error it holds a mixture, from which the next try goes
            on.
        dial: Makes a connection to a follower (lines.ParkedLines.dial).
        deadline_s: Seconds for the whole transfer.
        progress: Told the number of bytes that arrived, by several threads.
        abandoned: Asked now and then, by several threads; True ends the transfer.
        blank: See `fetch`.

    Returns:
        Its size in bytes.

    Raises:
        NoDonorError: A follower is away, does not have it, or cannot be reached (any more).
        StateError: The shard that a follower has does not fit.
        DeadlineError: The deadline passed.
    """
    assert part.format == format
    assert part.shard == part.shard.grid.whole
    assert [s.first for s in shards[1:]] == [a.stop for a, _ in pairwise(shards)]
    over = threading.Event()
    errors: list[BaseException] = []

    def given_up() -> bool:
        return over.is_set() or abandoned()

    def one(shard: Shard, holder: Holder) -> None:
        try:
            if not holder.endpoint:
                raise NoDonorError(f"version {version}: follower {holder.name} is away, which holds a shard of it")
            donor = Endpoint(holder.name, *split_endpoint(holder.endpoint))
            name, data = version_name(version, shard, format.name), [part.run(shard.first, shard.stop)]
            fetch(name, [donor], dial, data, deadline_s=deadline_s, progress=progress, abandoned=given_up, blank=blank)
        except BaseException as error:  # whoever waits for all of them raises it
            errors.append(error)
            over.set()

    threads = [
        threading.Thread(target=one, args=pair, name=f"chaos-fetch-{pair[1].name}", daemon=True)
        for pair in zip(shards, holders, strict=True)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s + STALL_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # each one's traceback leads to this list, and to the part
    if late := [thread.name for thread in threads if thread.is_alive()]:
        raise DeadlineError(f"version {version} took longer than {deadline_s:g} s, still waiting for {', '.join(late)}")
    return part.data.numel()
