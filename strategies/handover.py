"""Hands over the values that each member has logged and counted in an epoch, so that none are lost if it dies or
leaves.

Theory of operation. With each step a member says, beside its gradient, what it has accumulated since the epoch began:
the numbers that `self.log` keeps for the epoch, and the states of torchmetrics that it updates in training. The header
hands that on to all members (protocol.md 28b), so everybody has each other's part as of the last step that counts, as
bytes that are not looked into. When a member is gone, by death or leave, the first one of those who are left takes its
part over: numbers are added to its own, states count as those of one member more. Its own part has them from the next
step on, and until then everybody keeps both, in case the heir goes as well. What a step did not commit was not trained,
and is logged by those who train it.

States that are too large to travel with each step stay where they are; if their member goes, that is said by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from chaos_lightning.protocol.types import Header, Kind
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies import results
from chaos_lightning.strategies.lightning_types import Trainer
from chaos_lightning.strategies.metrics import Exchange, MetricRoute

_log = logging.getLogger("chaos_lightning")

MIN_STEP_NBYTES, MAX_STEP_NBYTES = 4 << 10, 256 << 10
"""Bounds of the bytes of all members' states that travel in one header; between them, a sixteenth of the gradient's
bytes.
"""
MAX_LEAVE_NBYTES = 8 << 20
"""Most bytes of states that a member sends when it leaves."""
_BEFORE_STEP = ("training_step", "on_train_batch_start", "on_train_epoch_start", "on_train_start")
"""Hooks whose values travel with the step of their own batch."""
_NUMBERS = ""
"""Stands, among names of metrics, for the numbers that `self.log` keeps."""


class Saying(Protocol):
    """Facts that are asked of the engine: the number of members, and whether this member has been asked to leave."""

    leaving: bool

    @property
    def world_size(self) -> int: ...


class Handover:
    """Logged values and metric states of the present epoch: this member's, and copies of the others'.

    Args:
        trainer: Trainer in fit.
        metrics: Metrics of this process.
        reduce: Function that `self.log(sync_dist=True)` syncs with.

    Attributes:
        metrics: Metrics of this process, from set-up to the end of fit.
        gone: Number of members that were seen to go; equal at all members after the same slot.
        limit: Most bytes of all members' states that travel with a step.
    """

    def __init__(self, trainer: Trainer, metrics: MetricRoute, reduce: Callable[..., Any]) -> None:
        self._trainer = trainer
        self.metrics = metrics
        self._reduce = reduce
        self._heard: dict[str, list[tuple[bytes, set[str]]]] = {}
        """Each member's part and those that it has taken over, with the names of what was reset since."""
        self._described: dict[str, dict[str, Any]] = {}
        """Facts on how each key was logged, as far as all members know it."""
        self._present: tuple[str, ...] = ()
        self.limit = MIN_STEP_NBYTES
        self.gone = 0
        metrics.on_reset = self._drop

    # ------------------------------------------------------------------ this member's part

    def fits_beside(self, gradient: int) -> None:
        """Limits the bytes of logged values sent with a gradient of `gradient` bytes, to a small part of it."""
        self.limit = min(MAX_STEP_NBYTES, max(MIN_STEP_NBYTES, gradient // 16))

    def says(self, member: Saying, *, alike: bool = False) -> bytes:
        """Returns the bytes that this member sends with its next step: the values that it has logged and counted in
        the epoch; b"" if none.

        Args:
            member: Facts about the member.
            alike: Whether all members log the same numbers, so that only metrics' states travel.
        """
        live = {} if alike else results.epoch_numbers(self._trainer.fit_loop.epoch_loop._results)
        limit = MAX_LEAVE_NBYTES if member.leaving else self.limit // max(1, member.world_size)
        states, left_out = self.metrics.trained(limit)
        if not live and not states and not left_out:
            return b""
        new = {key: results.described(item) for key, item in live.items() if key not in self._described}
        part = {
            "keys": list(live),
            "numbers": results.packed_numbers(live.values()),
            "states": states,
            "left out": left_out,
            "new": new,
        }
        return bytes([bool(new)]) + encode_payload(part)

    # ------------------------------------------------------------------ slots

    def committed(self, header: Header, answers: Mapping[str, bytes], present: tuple[str, ...], me: str) -> None:
        """Takes in a committed slot: keeps the members' values, and the first remaining member adds those of members
        that are gone to its own.

        Args:
            header: Header of the slot.
            answers: Bytes that each contributor said beside its gradient, if the slot is a step.
            present: Members of the view that it named, in rank order.
            me: Id of this member.
        """
        if header.kind is Kind.STEP:
            for member, answer in answers.items():
                if answer:
                    self._heard[member] = [(answer, set())]
                    if answer[0]:
                        self._described.update(_read(answer)["new"])
        self.gone += len(set(self._present) - set(present))
        self._present = present
        for member in [m for m in self._heard if m not in present]:
            parts = self._heard.pop(member)
            self._heard.setdefault(present[0], []).extend(parts)
            if me == present[0]:
                for part, dropped in parts:
                    self._take(member, _read(part), dropped)

    def _take(self, member: str, part: Mapping[str, Any], dropped: set[str]) -> None:
        if part["keys"] and _NUMBERS not in dropped:
            collection = self._trainer.fit_loop.epoch_loop._results
            lacking = {key: self._described[key] for key in part["keys"]}
            results.adopt_results(
                self._trainer, collection, {**lacking, **results.describe_results(collection)}, self._reduce
            )
            results.add_numbers(collection, part["keys"], part["numbers"])
            if late := sorted({d["name"] for d in lacking.values() if not d["fx"].startswith("training_step")}):
                _log.warning("%s is gone: %s of this epoch may lack its last batch", member, ", ".join(late))
        for name, states in part["states"].items():
            if name not in dropped:
                self.metrics.inherit(name, states)
        if lost := [name for name in part["left out"] if name not in dropped]:
            _log.warning(
                "%s is gone: of this epoch's %s only what the other members have seen is counted, since the states are "
                "too large to travel with each step (more than %d bytes of all members) or no attribute leads to it",
                member, ", ".join(lost), self.limit,
            )  # fmt: skip

    def _drop(self, name: str) -> None:
        """Notes that a metric, or the logged values of the epoch, was reset. All members note it, as they run the
        same script.
        """
        for parts in self._heard.values():
            for _, dropped in parts:
                dropped.add(name)

    def end_epoch(self) -> None:
        """Notes that the logged values of this epoch are computed."""
        self._drop(_NUMBERS)

    # ------------------------------------------------------------------ newcomers

    def manifest(self) -> dict[str, Any]:
        """Returns the values that all members have logged and counted, for newcomers and for the state that the last
        member keeps.
        """
        heard = {member: [[part, sorted(out)] for part, out in parts] for member, parts in self._heard.items()}
        return {"heard": heard, "described": self._described}

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        """Takes over the values that `manifest` returned at the donor."""
        self._heard = {member: [(part, set(out)) for part, out in parts] for member, parts in manifest["heard"].items()}
        self._described = dict(manifest["described"])

    def forget(self) -> None:
        """Forgets all values when this member joins again: other members have taken over what it had counted."""
        self.metrics.forget_trained()
        self._heard, self._present = {}, ()


def _read(part: bytes) -> dict[str, Any]:
    found: dict[str, Any] = decode_payload(part[1:])
    return found


def compute_epoch(trainer: Trainer, handover: Handover, exchange: Exchange, *, alike: bool = False) -> None:
    """Computes the logged values of a training epoch over all members, with `sync_dist=True` or without, under keys on
    which they agree.

    If somebody dies meanwhile, both are done anew, with the part of the dead. If all members have logged the same
    numbers (`alike`), each has those of the whole job, and a sum over members would count them several times.
    """
    collection = trainer.fit_loop.epoch_loop._results
    gone = -1
    while gone != handover.gone:
        gone = handover.gone
        results.agree(trainer, collection, exchange, "the training epoch", trainer.strategy.reduce)
        if not alike:
            results.reduce_all(collection)
    handover.end_epoch()
