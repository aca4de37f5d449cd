"""Closes a slot: from one contribution per member to the header that commits them.

Theory of operation. `close_slot` is what the commit root computes once it holds a contribution of every member of the
view (protocol.md 1, 2), and all agree in what must be equal (4a, 20, 23). Who differs (`differing`) is put out first,
by a view without it, in which the slot is closed anew from what the others contribute (6b). It is a pure function.
Payloads that do not fit into one header (`too_large`), which nobody could send, and samples that were spent twice give
a header whose `error` says so; nothing else in that header changes anything, so that all members raise the same words
and none applies the slot. In a view with pipelines micro-batches that a layer's sums lack, or hold twice, are such an
error, too (`miscounted`, P3). Otherwise weights, presence bits, spent sample ranges and payloads are folded in rank
order, state hashes are put to the vote (24), and a waiting view is carried if the slot's kind allows it: `carried`
holds that rule in one place. A member that leaves brings nothing and no longer follows the script, so its contribution
may yield: whatever the others close, it goes along (`leading`). So may that of a member without samples: it runs no
training step, so it cannot foresee a collective in the others'. Of two collectives by different names it goes along
with the others', whose answers then miss what it had brought to its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence

from chaos_lightning.membership.parts import Division, division, numbers
from chaos_lightning.planning.batch import read_split
from chaos_lightning.planning.ledger import merge
from chaos_lightning.protocol.limits import bounded
from chaos_lightning.protocol.types import (
    MAX_GATHER_NBYTES,
    Contribution,
    Differs,
    DriftedPart,
    Header,
    Kind,
    Spent,
    View,
    ViewId,
    equal_shares,
)

_OF_STEPS = ("reduced", "micro_batches")
"""Fields that are set only in steps, and in rounds of evaluation, that run as units."""
EQUAL_FIELDS = ("prev_hash", "kind", "name", "step", "layout_hash", "hyper", "order", "lets_go", *_OF_STEPS)
"""Fields in which all contributions to one slot must agree, in the order in which they are compared."""
_equal_fields = operator.attrgetter(*EQUAL_FIELDS)


def by_units(view: View, contribution: Contribution) -> bool:
    """Returns whether pipeline units ran for this contribution, so that it counts only in the attempt in which they ran
    (P4, P17).
    """
    return bool(view.pipelines) and (contribution.kind is Kind.STEP or bool(contribution.micro_batches))


def of_one_attempt(view: View, contribution: Contribution) -> bool:
    """Returns whether this contribution counts only in the view in which it was made: pipeline units ran for it, or it
    has the member's share of a batch of fixed size, which is another one in each view (B3). One that yields has none.
    """
    shared = bool(view.batch) and contribution.kind is Kind.STEP and not contribution.yields
    return by_units(view, contribution) or shared


def follows(base: Header, last: Header, entered: ViewId) -> bool:
    """Returns whether a member can commit a recovery's base next: it is at the header before, and has the sums if these
    cannot be fetched (P5).

    Args:
        base: The recovery's.
        last: The header on which the member stands.
        entered: Its view.
    """
    return last.hash == base.prev_hash and (not base.reduced or base.view == entered)


def admitting(header: Header, member: str, entered: ViewId) -> View | None:
    """Returns the view with which this header lets a newcomer in, which then fetches the state at this header (15, 17
    "pause"); None if none.

    Args:
        header: A header.
        member: The newcomer.
        entered: The view in which it stands already; `NO_VIEW` if there is none.
    """
    change = header.view_change
    return change if change is not None and member in change.joiners and change.id > entered else None


def carriable(waiting: View | None, ruling: View) -> View | None:
    """Returns the waiting view if it directly follows the ruling view, so that the next header may carry it; else
    None.
    """
    return waiting if waiting is not None and waiting.predecessor == ruling.id else None


def differing(view: View, contributions: Mapping[str, Contribution]) -> tuple[Differs, ...]:
    """Returns members whose contributions differ from the others', in the first field that differs; () if all agree.

    What most of those have who do not yield counts; on a tie what the oldest of them has, as with state hashes (24).
    """
    first = leading(view, contributions)
    if view.batch and (left := _unshared(view, first, contributions)):
        return left
    expected = _equal_fields(first)
    if all(_equal_fields(contributions[m]) == expected for m in view.ids()):
        return ()
    ordered = [first, *(c for m in view.ids() if (c := contributions[m]) is not first)]
    voters = [c for c in ordered if not c.yields] or ordered[:1]
    for name in EQUAL_FIELDS:
        votes = Counter(getattr(c, name) for c in voters)
        reference = max(voters, key=lambda c: votes[getattr(c, name)])  # the oldest of those with as many votes
        expected = getattr(reference, name)
        found = [
            other
            for other in ordered
            if getattr(other, name) != expected and not (other.yields and name in _yielded(reference, other))
        ]
        if found:
            return tuple(Differs(c.member, bounded(_unequal(name, reference, c)), name == "prev_hash") for c in found)
    return ()


def _unshared(view: View, first: Contribution, contributions: Mapping[str, Contribution]) -> tuple[Differs, ...]:
    """Returns members that left their script with a share of a batch of fixed size undone; () if all members have left
    theirs.
    """
    split = read_split(view.batch, len(view.members))
    if split is None or first.yields or first.kind is not Kind.STEP:
        return ()
    gone = [m for m, share in zip(view.ids(), split.shares, strict=True) if share and contributions[m].yields]
    words = f"slot {first.seq}: it left without computing its share of the step, which the others do now"
    return tuple(Differs(member, words, rejoin=True) for member in gone)


def _unequal(name: str, reference: Contribution, other: Contribution) -> str:
    """Returns text on a field in which a member's contribution differs from the reference contribution."""
    if name in ("kind", "name") and (reference.kind, other.kind) != (Kind.STEP, Kind.STEP):
        return _at_different_calls(reference, other)
    if name == "order":
        return _in_different_orders(reference, other)
    expected, given = str(getattr(reference, name)), str(getattr(other, name))
    if name == "hyper":  # of many, those that differ
        its, the_jobs = given.split(";"), expected.split(";")
        given = ";".join(word for word in its if word not in the_jobs) or given
        expected = ";".join(word for word in the_jobs if word not in its) or expected
    return (
        f"slot {reference.seq}: {other.member} has {name} {given!r}, {reference.member} has {expected!r}; both must be "
        "equal at every member: compare their scripts and settings"
    )


def _at_different_calls(one: Contribution, other: Contribution) -> str:
    """Returns text on two members that meet in the same slot at different calls of the script, and what to do about
    it.
    """
    remedy = (
        "move the call out of `if rank == 0:`, `if trainer.is_global_zero:` and the like. A checkpoint is written by "
        "one member though all ask for it, and a value that one member alone logs needs no sync_dist=True"
        if Kind.GATHER in (one.kind, other.kind)
        else "decide to stop by a value that all members have, such as one that they have gathered or reduced"
    )
    return (
        f"slot {one.seq}: {_doing(one)}, and {_doing(other)}. All members must make the same calls in the same order, "
        f"whatever their rank and their own values: {remedy}"
    )


def _in_different_orders(one: Contribution, other: Contribution) -> str:
    """Returns text on two members that have the samples of one epoch in different orders."""
    return (
        f"slot {one.seq}: {other.member} has {other.order or 'no shared order'}, {one.member} has "
        f"{one.order or 'no shared order'}; members must have the samples of an epoch in one order, or some are never "
        "trained and others twice. A sampler's order must follow from the seed and the epoch alone (draw from torch's "
        "generator, or implement set_epoch), not from losses or other state that a member has for itself; a data set "
        "that grows must be as long on all members when they load it for an epoch"
    )


def _doing(contribution: Contribution) -> str:
    """Returns text on what a member does in this slot, and at which line of its code."""
    does = {
        Kind.STEP: "goes on to its next step",
        Kind.GATHER: f"makes the collective {contribution.name!r}",
        Kind.BOUNDARY: "goes on to let newcomers in",
        Kind.CLOSING: "has ended its training",
    }[contribution.kind]
    return f"{contribution.member} {does}" + (f" ({contribution.line})" if contribution.line else "")


def _yielded(reference: Contribution, other: Contribution) -> tuple[str, ...]:
    """Returns the fields in which a contribution that yields to the others' may differ from theirs.

    These are all that the script gives, except a step's section.
    """
    if other.kind is Kind.GATHER:
        return ("name", "lets_go")
    same_kind = other.kind is reference.kind
    return ("kind", "hyper", "order", "micro_batches") if same_kind else ("kind", "hyper", "order", "name", *_OF_STEPS)


def leading(view: View, contributions: Mapping[str, Contribution]) -> Contribution:
    """Returns the contribution that determines the slot: the root's, or the oldest member's if the root yields."""
    ordered = [contributions[view.root], *(contributions[m] for m in view.ids())]
    return next((c for c in ordered if not c.yields), ordered[0])


def kind_of(view: View, prev: Header, contributions: Mapping[str, Contribution]) -> Kind:
    """Returns the kind of the slot after `prev`: a BOUNDARY if no script decides, and newcomers wait or the batch has a
    fixed size, else the leading contribution's kind.

    A step without samples would count, and a batch of fixed size has none (B1). A member that yields only because it
    has no samples has hyperparameters: it follows a script, and is not at rest.
    """
    first = leading(view, contributions)
    at_rest = first.yields and not first.hyper
    return Kind.BOUNDARY if at_rest and (prev.boundary or (view.batch and first.kind is Kind.STEP)) else first.kind


def fitting(payload: bytes) -> bytes:
    """Returns the payload that a member contributes to a GATHER or STEP; of one that is too large, enough to be
    refused.

    A member that raised alone would leave the others waiting for its contribution. One byte above the limit still fits
    into a message, and the root refuses the slot for all of them alike.
    """
    return payload[: MAX_GATHER_NBYTES + 1]


def too_large(contributions: Sequence[Contribution]) -> str:
    """Returns an error text if these payloads are too large for one header together; else ""."""
    total = sum(len(c.payload) for c in contributions)
    if total <= MAX_GATHER_NBYTES:
        return ""
    most = max(contributions, key=lambda c: len(c.payload))  # the oldest of those with the same size
    more = " or more" if len(most.payload) > MAX_GATHER_NBYTES else ""  # it was cut (see `fitting`)
    what = "step" if most.kind is Kind.STEP else "collective"
    return (
        f"slot {most.seq}: the payloads of the {what} {most.name!r} have {total} bytes{more} in all, of which "
        f"{len(most.payload)}{more} are of {most.member}; the limit is {MAX_GATHER_NBYTES}, as they all travel in one "
        "message: gather less at once, such as a metric's result in place of all its samples, or in several calls"
    )


def answers_of(kind: Kind, name: str, contributions: Sequence[Contribution]) -> tuple[bytes, ...]:
    """Returns the payloads that the slot's header gives to all members, in rank order: for a GATHER always, for a STEP
    if any is not empty (28b).
    """
    answers = tuple(c.payload if (c.kind, c.name) == (kind, name) else b"" for c in contributions)
    said = kind is Kind.GATHER or (kind is Kind.STEP and any(answers))
    return answers if said else ()


def presence_of(contributions: Sequence[Contribution]) -> bytes:
    """Returns the bitwise OR of the members' presence masks; a short mask is padded with zeros."""
    length = max((len(c.presence) for c in contributions), default=0)
    bits = 0
    for contribution in contributions:
        bits |= int.from_bytes(contribution.presence, "little")
    return bits.to_bytes(length, "little")


def drifted(parts: Division, contributions: Mapping[str, Contribution]) -> tuple[DriftedPart, ...]:
    """Returns the owners' copies of parts of the state whose hash differs from most other owners'; on a tie the oldest
    owner's counts (24, P12).
    """
    hashes = {c.member: _hashes(parts, c) for c in contributions.values() if c.state_hashes}
    found: list[DriftedPart] = []
    for part, owners in enumerate(parts.owners if hashes else ()):
        votes = [(m, hashes[m][part]) for m in owners if m in hashes]
        counts = Counter(value for _, value in votes)
        winner = max(votes, key=lambda vote: counts[vote[1]], default=("", ""))[1]  # the oldest of those with as many
        found += [DriftedPart(member, part) for member, value in votes if value != winner]
    return tuple(found)


def _hashes(parts: Division, contribution: Contribution) -> dict[int, str]:
    return dict(zip(numbers(parts.owned(contribution.member)), contribution.state_hashes, strict=True))


def miscounted(parts: Division, first: Contribution, contributions: Mapping[str, Contribution]) -> str:
    """Returns an error text if some layer's sums miss or repeat a micro-batch, or a member has not one hash per owned
    part; else "" (P3, P12).

    Members of one attempt have one plan, so either can only be a bug.

    Args:
        parts: Parts of the state in the view.
        first: The contribution that says what the slot is.
        contributions: Contributions by member of the view.
    """
    wrong = ""
    for member, said in contributions.items():
        given = len(said.state_hashes)
        if given and given != (owned := len(numbers(parts.owned(member)))):
            wrong = f"{member} gives hashes of {given} parts, and owns {owned}"
    if first.micro_batches or first.kind is Kind.STEP:
        given_by = {member: c.coverage for member, c in contributions.items()}
        wrong = wrong or parts.coverage_error(first.micro_batches, given_by)
    return f"slot {first.seq}: {wrong}; please report this, with the logs of all members" if wrong else ""


def carried(kind: Kind, waiting: View | None, *, lets_go: bool = False) -> tuple[View | None, bool]:
    """Returns the view that a header of this kind carries (or None), and whether the header must ask for a BOUNDARY
    slot.

    Joiners enter only by a BOUNDARY header: every member is at rest there, so the state that the joiner pulls cannot
    change. Other changes ride on any STEP or BOUNDARY header, and on that of a GATHER which lets go. No other GATHER
    does: a validation pass must see a constant membership, except for deaths. The request for a boundary is repeated on
    every header until the boundary comes, so that "the last header asks for it" is all that a member has to look at.
    """
    if waiting is None or kind is Kind.CLOSING:
        return None, False
    if waiting.joiners:
        return (waiting, False) if kind is Kind.BOUNDARY else (None, True)
    return (waiting, False) if kind in (Kind.STEP, Kind.BOUNDARY) or lets_go else (None, False)


def close_slot(
    *,
    view: View,
    prev: Header,
    contributions: Mapping[str, Contribution],
    waiting: View | None = None,
    learners: tuple[str, ...] = (),
) -> Header:
    """Returns the header that commits the slot after `prev` for all members of `view`.

    Args:
        view: The ruling view; `contributions` holds exactly one entry for each of its members.
        prev: The header that the root stands on.
        contributions: Contributions by member id; none is `differing`.
        waiting: A decided view whose predecessor is `view`, not carried yet.
        learners: Newcomers that are served from this slot on.
    """
    contributions = {m: contributions[m] for m in view.ids()}
    ordered = list(contributions.values())
    first, kind = leading(view, contributions), kind_of(view, prev, contributions)
    error, ledger = "", prev.ledger
    spent: list[Spent] = [s for c in ordered for s in c.spent]
    try:
        ledger = merge(prev.ledger, spent) if spent else prev.ledger
    except ValueError as problem:
        error = f"slot {first.seq}: {problem}"
    parts = division(view)
    error = error or too_large(ordered) or miscounted(parts, first, contributions)
    if error:
        return Header(
            seq=prev.seq + 1,
            kind=kind,
            step=first.step,
            view=view.id,
            prev_hash=prev.hash,
            next_view=view.id,
            name=first.name,
            ledger=prev.ledger,
            layout_hash=prev.layout_hash,
            hyper=prev.hyper,
            error=error,
            learners=prev.learners,
        )
    change, boundary = carried(kind, waiting, lets_go=kind is Kind.GATHER and first.lets_go)
    return Header(
        seq=prev.seq + 1,
        kind=kind,
        step=first.step + (kind is Kind.STEP),
        view=view.id,
        prev_hash=prev.hash,
        next_view=change.id if change is not None else view.id,
        name=first.name,
        shares=equal_shares((c.weight, c.coefficient) for c in ordered),
        presence=presence_of(ordered),
        ledger=ledger,
        answers=answers_of(kind, first.name, ordered),
        layout_hash=first.layout_hash or prev.layout_hash,
        hyper=first.hyper or prev.hyper,
        view_change=change,
        boundary=boundary,
        drifted=drifted(parts, contributions),
        learners=learners,
        reduced=kind is Kind.STEP and first.reduced,
    )
