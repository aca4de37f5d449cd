"""Pulls the state of one committed header for a joiner, from all donors at once.

Theory of operation. (1) *Survey*: every donor is asked for the hash of its state at the header. What most of them
have is taken; of several equally frequent ones that of the donor listed first, which is the older member. Who differs
is not used and is named in the report (protocol.md 24). Who stands on another header refuses by itself (protocol.md
11, 15). (2) The *lead*, one of those, gives the manifest and the table of piece hashes. (3) `state.prepare` makes the
tensors, the pieces that are here already are found by hash and skipped (protocol.md 16). (4) All donors deliver the
rest, a thread each, pipelined, straight into tensor memory; each piece is verified on arrival. A donor that dies,
stalls or sends wrong bytes costs time only; how the work is shared is the transfer policy's (policies.py). If the
donors of the attached tensors are gone, a new round starts with another lead, and what arrived is skipped. (5)
`state.adopt`, and the whole state is hashed again where it now lies (protocol.md 19).

If a pull fails the tensors hold a mixture: the caller must not contribute, and may only pull again.

`pull_result` does the same for raw reduced bytes (a hand-on, protocol.md 9), which have no table: frames carry
checksums.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import torch
import xxhash
from torch import Tensor

from chaos_lightning.errors import ChaosError, StateError, WireError
from chaos_lightning.protocol.spans import union
from chaos_lightning.protocol.types import Span
from chaos_lightning.replication import bulk
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.bulk import BulkFrame, Type
from chaos_lightning.replication.client import Donor, PullConfig, StateDigest
from chaos_lightning.replication.hashing import Hashes, Own, hash_regions
from chaos_lightning.replication.landing import Landing
from chaos_lightning.replication.manifest import decode_values, fitting
from chaos_lightning.replication.memory import Region, region
from chaos_lightning.replication.policies import make_policy
from chaos_lightning.replication.policy import Job, SharedQueue, TransferPolicy, cut_jobs
from chaos_lightning.replication.session import PullMeter, PullReport, PullSession, Tell
from chaos_lightning.replication.source import Dial, Endpoint
from chaos_lightning.replication.table import Piece, StateTable, build_table, decode_table, dtype_name
from chaos_lightning.replication.work_queue import WorkQueue

EARLY_S = 1.0
"""Seconds for which a donor's manifest is waited for before anything is compared."""


class StateSink:
    """Sink that writes received pieces into the joiner's tensors."""

    request = Type.GET_STATE
    flags = bulk.UNSUMMED

    def __init__(self, regions: Sequence[Region]) -> None:
        """Takes the memory regions of the joiner's tensors, in the order of the table's entries."""
        self._regions = regions

    def land(self, job: Job) -> list[memoryview]:
        return [self._regions[p.entry].land(p.start, p.stop) for p in job.pieces]

    def landed(self, job: Job, buffers: list[memoryview], frame: BulkFrame, *, in_place: bool) -> list[Piece] | None:
        bad = []
        for piece, buffer in zip(job.pieces, buffers, strict=True):
            if xxhash.xxh3_128_digest(buffer) != piece.digest:
                bad.append(piece)
            elif in_place:
                self._regions[piece.entry].landed(piece.start, piece.stop, buffer)
        return bad

    def place(self, job: Job, buffers: list[memoryview]) -> None:
        for piece, buffer in zip(job.pieces, buffers, strict=True):
            landing = self._regions[piece.entry].land(piece.start, piece.stop)
            landing[:] = buffer
            self._regions[piece.entry].landed(piece.start, piece.stop, landing)


class ResultSink:
    """Sink that writes received reduced bytes into one flat buffer."""

    request = Type.GET_RESULT
    flags = 0

    def __init__(self, target: Region) -> None:
        self._target = target

    def land(self, job: Job) -> list[memoryview]:
        return [self._target.land(job.start, job.stop)]

    def landed(self, job: Job, buffers: list[memoryview], frame: BulkFrame, *, in_place: bool) -> list[Piece] | None:
        if bulk.checksum_of(buffers) != frame.checksum:
            return None
        if in_place:
            self._target.landed(job.start, job.stop, buffers[0])
        return []

    def place(self, job: Job, buffers: list[memoryview]) -> None:
        landing = self._target.land(job.start, job.stop)
        landing[:] = buffers[0]
        self._target.landed(job.start, job.stop, landing)


class _Survey:
    """Survey of the donors: which state each of them has."""

    def __init__(self, session: PullSession, patient: bool) -> None:
        self.session = session
        self.patient = patient
        self.digests: dict[str, StateDigest] = {}
        self._first_at = float("inf")

    def begin(self) -> None:
        """Asks all donors for the hashes of their state."""
        for member, donor in self.session.donors.items():
            self.session.start("digest", member, donor.digest)

    def run(self) -> None:
        """Waits until a majority of donors agree on a state, or no further donor is about to answer."""
        while not self._decided():
            for kind, member, digest in self.session.collect(0.1):
                if kind == "digest":
                    self.heard(member, digest)

    def heard(self, member: str, digest: StateDigest) -> None:
        """Notes the hashes with which this donor has answered."""
        self.digests[member] = digest
        self._first_at = min(self._first_at, time.monotonic())

    def _decided(self) -> bool:
        session = self.session
        waiting = session.pending("digest")
        open_ = [m for m in waiting if m not in session.loading]
        if not waiting:
            return True
        if not self.digests:
            return False
        if not open_:
            return True
        most = Counter(d.state for d in self.digests.values()).most_common(1)[0][1]
        if 2 * most > len(self.digests) + len(open_) and not self.patient:
            return True
        now, grace_s = time.monotonic(), session.config.survey_grace_s
        # Donors that say they are still on their way get longer, but not for ever.
        return now - self._first_at > 4 * grace_s or all(now - session.donors[m].heard_at > grace_s for m in open_)

    def living(self) -> list[str]:
        """Returns the donors that answered and have not failed, oldest first."""
        return [m for m in self.session.order if m in self.digests and m not in self.session.failed]

    def choose(self) -> str | None:
        """Chooses the donor that gives table and manifest: the oldest of those with the most frequent state and, among
        these, the most frequent attached tensors; None if no donor is left.
        """
        living = self.living()
        for field in ("state", "attached"):
            values = [getattr(self.digests[m], field) for m in living]
            counts = Counter(values)
            best = max(values, key=lambda v: (counts[v], -values.index(v)), default=None)
            living = [m for m in living if getattr(self.digests[m], field) == best]
        return living[0] if living else None


class _StatePull:
    def __init__(
        self,
        session: PullSession,
        state: StateAccess,
        policy: TransferPolicy,
        progress: Tell | None,
        replayed: bool,
    ) -> None:
        self.session = session
        self.state = state
        self.policy = policy
        self.progress = progress
        self.replayed = replayed
        self.survey = _Survey(session, policy.patient)
        self.skipped: int | None = None
        self._own: Own | None = None
        self._piece_nbytes = session.config.piece_nbytes

    def run(self, head: str, seq: int) -> PullReport:
        early = self._ask_early() if self.replayed else None
        self.survey.begin()
        mine = self._adopt_early(early) if early is not None else None
        if mine is None and not self.session.config.blank:
            self._own = Own(self.state.tensors(), self._piece_nbytes)
        self.survey.run()
        lead = self.survey.choose()
        if mine is not None and lead is not None and self._same(lead, *mine):
            self.skipped = mine[0].nbytes
            return self._report(head, seq, lead, mine[0].nbytes, 1)
        work_queue: WorkQueue | None = None
        table: StateTable | None = None
        rounds = 0
        while True:
            lead = self.survey.choose()
            if lead is None:
                raise self.session.exhausted(work_queue, self._namer(table))
            asked = self._ask(lead)
            if asked is None:
                continue
            table, text = asked
            try:
                landing = Landing(self.state, table, text, self.session.config.max_attached_nbytes)
            except WireError as error:
                self.session.drop(lead, str(error))
                continue
            rounds += 1
            work_queue = self._round(lead, table, landing)
            if work_queue is None:
                break
        return self._report(head, seq, lead, table.nbytes, rounds)

    def _report(self, head: str, seq: int, lead: str, nbytes: int, rounds: int) -> PullReport:
        digests = self.survey.digests
        taken = digests[lead].state
        return self.session.report(
            head,
            seq,
            nbytes,
            self.skipped or 0,
            state_hash=taken,
            disagreeing=tuple(m for m in self.session.order if m in digests and digests[m].state != taken),
            rounds=rounds,
        )

    # ------------------------------------------------------------------ nothing is expected to be missing

    def _ask_early(self) -> Future[bytes]:
        """Asks the oldest donor for its manifest before donors hash their states; returns a future."""
        first = self.session.donors[self.session.order[0]]
        return first.submit(lambda: first.ask(Type.GET_MANIFEST, Type.MANIFEST))

    def _adopt_early(self, asked: Future[bytes]) -> tuple[StateTable, str] | None:
        """Adopts the oldest donor's manifest while donors still hash, then hashes the joiner's own state; returns its
        table and the manifest's hash.

        If all of it is what the donors have, this is the proof (protocol.md 19). None: not without their table.
        """
        try:
            text = asked.result(min(EARLY_S, max(0.0, self.session.deadline - time.monotonic())))
            tensors = self.state.tensors()
            manifest = decode_values(text, dict(tensors))
        except (ChaosError, OSError, TimeoutError):  # what is wrong shows again when it matters
            return None
        with fitting():
            self.state.prepare(manifest, build_table(tensors, hashes=[()] * len(tensors)))
            self.state.adopt(manifest)
        tensors, size = self.state.tensors(), self._piece_nbytes
        self._own = Own(tensors, size)
        regions = [region(name, tensor) for name, tensor in tensors]
        table = build_table(tensors, regions=regions, hashes=self._own.of(tensors, regions), piece_nbytes=size)
        return table, xxhash.xxh3_128_hexdigest(text)

    def _same(self, lead: str, mine: StateTable, manifest: str) -> bool:
        theirs = self.survey.digests[lead]
        return (theirs.state, theirs.attached, theirs.manifest) == (mine.state_hash, mine.attached_hash, manifest)

    # ------------------------------------------------------------------ rounds

    def _ask(self, lead: str) -> tuple[StateTable, bytes] | None:
        """Asks the chosen donor for its table and manifest; returns None if the donor failed."""
        donor = self.session.donors[lead]
        size = self._piece_nbytes
        self.session.start("control", lead, lambda: _control(donor, size))
        found: tuple[StateTable, bytes] | None = None
        while self.session.pending("control"):
            for kind, member, result in self.session.collect():
                if kind == "digest":
                    self.survey.heard(member, result)
                else:
                    found = result
        if found is None:
            return None
        digest, table = self.survey.digests[lead], found[0]
        if (table.state_hash, table.attached_hash) != (digest.state, digest.attached):
            self.session.drop(lead, f"its table has the state hash {table.state_hash}, it announced {digest.state}")
            return None
        return found

    def _round(self, lead: str, table: StateTable, landing: Landing) -> WorkQueue | None:
        """Fetches the missing pieces and adopts the state; returns the work queue if donors ran out before all pieces
        arrived.
        """
        regions = landing.regions
        missing = self._missing(table, landing, regions)
        missing_nbytes = sum(p.nbytes for p in missing)
        if self.skipped is None:
            self.skipped = table.nbytes - missing_nbytes
        work_queue = self._deliver(lead, table, regions, missing, missing_nbytes)
        if work_queue.left_nbytes:
            return work_queue
        landing.finish()
        if self.session.config.prove:
            self._prove(table)
        return None

    def _missing(self, table: StateTable, landing: Landing, regions: Sequence[Region]) -> list[Piece]:
        """Returns the pieces to fetch; hashes the joiner's tensors anew in a second round, since the first one changed
        them.
        """
        own, blank = self._own, self.session.config.blank and self.skipped is None
        self._own = None
        if blank:
            return list(table.pieces())
        hashes = hash_regions(regions, self._piece_nbytes) if own is None else own.of(landing.named, regions)
        return _missing(table, hashes)

    def _deliver(
        self, lead: str, table: StateTable, regions: Sequence[Region], missing: Sequence[Piece], missing_nbytes: int
    ) -> WorkQueue:
        digests = self.survey.digests
        wanted = digests[lead]
        usable = [m for m in self.survey.living() if digests[m].state == wanted.state]
        holders = frozenset(m for m in usable if digests[m].attached == wanted.attached)
        meter = PullMeter(table.nbytes, table.nbytes - missing_nbytes, self.progress)

        def recruit(kind: str, member: str, result: Any) -> bool:
            digests[member] = result
            return bool(result.state == wanted.state)

        meter(0, {})
        # The lead comes first: it holds what only the manifest refers to.
        usable.sort(key=lambda m: (m != lead, self.session.order.index(m)))
        grain = self.policy.grain_nbytes(missing_nbytes, len(usable), self.session.config.request_nbytes)
        jobs = cut_jobs(table, missing, grain, attached=holders)
        return self.session.deliver(
            jobs, StateSink(regions), usable, policy=self.policy, on_bytes=meter, recruit=recruit
        )

    def _prove(self, table: StateTable) -> None:
        """Checks that the joiner's adopted state has the donors' hash (protocol.md 19); raises StateError that names
        what differs.
        """
        tensors = self.state.tensors()
        theirs = [e for e in table.entries if not e.attached]
        same = [(e.name, e.dtype, e.shape) for e in theirs] == [
            (name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors
        ]
        # The state hash is one over names, types, shapes and these very piece hashes.
        size = self._piece_nbytes
        here = hash_regions([region(name, t) for name, t in tensors], size)
        if same and not _missing(StateTable(tuple(theirs), size), here):
            return
        mine = build_table(tensors, piece_nbytes=size)
        for a, b in zip(theirs, mine.entries, strict=False):
            if (a.name, a.dtype, a.shape, a.hashes) != (b.name, b.dtype, b.shape, b.hashes):
                raise StateError(
                    f"after the state was adopted, tensor {b.words()} is not what the donors have as "
                    f"{a.words()}: "
                    "adopting the manifest changed it, or something here still writes to it"
                )
        raise StateError(f"after the state was adopted, it has {len(mine.entries)} tensors instead of {len(theirs)}")

    @staticmethod
    def _namer(table: StateTable | None) -> Any:
        if table is None:
            return None
        known = table
        return lambda job: known.entries[job.pieces[0].entry].words()


def _control(donor: Donor, piece_nbytes: int) -> tuple[StateTable, bytes]:
    """Asks a donor for its table and manifest and returns them; runs in the donor's thread."""
    text = donor.ask(Type.GET_MANIFEST, Type.MANIFEST)
    return decode_table(donor.ask(Type.GET_TABLE, Type.TABLE), piece_nbytes), text


def _missing(table: StateTable, hashes: Sequence[Hashes]) -> list[Piece]:
    """Returns the pieces of the donors' table whose hashes differ from those of the joiner's own bytes (protocol.md
    16).
    """
    mine = (digest for here in hashes for digest in here)
    return [piece for piece, digest in zip(table.pieces(), mine, strict=True) if piece.digest != digest]


def pull_state(
    donors: Sequence[Endpoint],
    dial: Dial,
    *,
    head: str,
    seq: int,
    state: StateAccess,
    config: PullConfig | None = None,
    policy: TransferPolicy | None = None,
    progress: Tell | None = None,
    abandoned: Callable[[], bool] | None = None,
    replayed: bool = False,
    loading: frozenset[str] = frozenset(),
    grew: Callable[[float], None] = lambda idle_s: None,
) -> PullReport:
    """Makes this member's state equal to the donors' at a header.

    Args:
        donors: Members that may have the state, the oldest first.
        dial: Opens an authenticated bulk socket to an endpoint; called in a thread of its own for each donor.
        head: Hash of the committed header.
        seq: Slot of the header.
        state: This member's state; `prepare` and `adopt` are called in the calling thread.
        config: Waits and sizes.
        policy: Policy that decides which donor sends what (policies.make_policy), new for each pull; `adaptive` without
            estimates if None.
        progress: Function that is told of bytes that arrived.
        abandoned: Function that is asked now and then; True ends the pull, for what it was for is superseded.
        replayed: The state should be the donors' already: their manifest is adopted before anything is compared.
        loading: Donors that get the state themselves, and serve it once they have it.
        grew: Called with the seconds since this state grew, here or at an awaited donor (`StateServer.grew`).

    Raises:
        StateError: No donor is left (says what is missing and why each fell out), the state does not fit here
            (says which tensor), or the pull was abandoned.
        DeadlineError: The deadline passed.
    """
    policy = policy or make_policy("adaptive")
    with PullSession(policy.sources(donors), dial, what="state", head=head, seq=seq, config=config) as session:
        session.abandoned, session.loading = abandoned, loading
        for donor in session.donors.values():
            donor.grew = grew
        return _StatePull(session, state, policy, progress, replayed).run(head, seq)


def pull_result(
    donors: Sequence[Endpoint],
    dial: Dial,
    *,
    head: str,
    seq: int,
    memory: Tensor | memoryview,
    spans: Mapping[str, Sequence[Span]],
    wanted: Sequence[Span] | None = None,
    config: PullConfig | None = None,
) -> PullReport:
    """Pulls the reduced bytes of a slot from members that have them (a hand-on, protocol.md 9).

    Args:
        donors: Members that hold some of the bytes.
        dial: Opens an authenticated bulk socket to an endpoint.
        head: Hash of the slot's header.
        seq: The slot.
        memory: Flat uint8 of the result's full size; received into in place.
        spans: The byte ranges that each donor holds, by member id.
        wanted: The byte ranges that are needed here; all if None.
        config: Timeouts and sizes.

    Raises:
        StateError: Some wanted bytes have no donor (any more).
        DeadlineError: The deadline passed.
    """
    flat = memory if isinstance(memory, Tensor) else torch.frombuffer(memory.cast("B"), dtype=torch.uint8)
    if flat.dtype is not torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"reduced bytes must be flat contiguous uint8, got {flat.dtype}{list(flat.shape)}")
    needed = union(wanted if wanted is not None else [(0, flat.numel())])
    if needed and (needed[0][0] < 0 or needed[-1][1] > flat.numel()):
        raise ValueError(f"spans {list(needed)} are not within the {flat.numel()} reduced bytes")
    with PullSession(donors, dial, what="result", head=head, seq=seq, config=config) as session:
        held = {e.member: union(spans.get(e.member, ())) for e in donors}
        jobs = _result_jobs(needed, held, session.config.request_nbytes)
        total = sum(stop - start for start, stop in needed)
        target = region("reduced bytes", flat)
        work_queue = session.deliver(
            jobs, ResultSink(target), session.order, policy=SharedQueue(), on_bytes=lambda nbytes, stats: None
        )
        if work_queue.left_nbytes:
            raise session.exhausted(work_queue)
        target.finish()
        return session.report(head, seq, total, 0)


def _result_jobs(needed: Sequence[Span], held: Mapping[str, Sequence[Span]], request_nbytes: int) -> list[Job]:
    """Divides byte ranges into jobs, each of whose bytes have the same holders; raises StateError if some bytes have no
    holder.
    """
    borders = sorted({b for spans in held.values() for span in spans for b in span})
    jobs = []
    for start, stop in needed:
        cuts = [start, *(b for b in borders if start < b < stop), stop]
        for low, high in pairwise(cuts):
            only = frozenset(m for m, spans in held.items() if any(a <= low and high <= b for a, b in spans))
            if not only:
                raise StateError(f"nobody holds the reduced bytes [{low}, {high}): reduce the slot again")
            jobs += [Job(at, min(at + request_nbytes, high), only=only) for at in range(low, high, request_nbytes)]
    return jobs


__all__ = ["PullReport", "pull_result", "pull_state"]
