"""Carries out Lightning's small collectives as numbered slots of the job (protocol.md 28).

Theory of operation. Each collective is one gather: every member sends its value, gets everybody's in rank order, and
computes the answer by itself, so that all get the same bits. The slot's name says which call it is, so members that
are at different places are told so by name instead of hanging. While this member is not in the job (setting up, after
leaving, between being fenced and joining again) every collective answers with the member's own value.

Inside `training_step` things differ: a member without samples in a micro-batch does not run `training_step` at all,
so a collective there would find some members and miss others. What `self.log(..., on_step=True, sync_dist=True)`
reduces is therefore put aside and exchanged once, when every member is past its `training_step`, by the keys under
which it was logged; the tensors that `log` holds are filled in place. Other collectives inside `training_step` are
refused by name.

A member without samples cannot know whether the others log anything there for the first time. What it contributes next
therefore yields (`owes`): if the others exchange logged values first, it goes along, and contributes again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor

from chaos_lightning.errors import DisagreementError, UnsupportedError
from chaos_lightning.member.calls import users_line
from chaos_lightning.replication.payload import decode_payload, encode_payload
from chaos_lightning.strategies import results

Gather = Callable[[str, bytes, str], list[tuple[str, bytes]] | None]

_SKIPPED = ("strategy.py", "collectives.py", "parallel.py", "apply_func.py", "contextlib.py")
LOG_DIR = "trainer.py:log_dir"
"""Call site of the broadcast of `trainer.log_dir`, which happens whenever it is asked for."""
_LOGGED = {hook: f"values logged in {hook} with sync_dist=True" for hook in ("training_step", "validation_step")}


def call_site() -> str:
    """Returns `file.py:function` of the code that called the collective, without the frames of the strategy and of
    generic helpers.
    """
    return _site(_asking(_SKIPPED))


def users_call_site() -> str:
    """Returns `file.py:function` of the user's code that called the collective; "" if Lightning called it."""
    frame = _asking((*_SKIPPED, "module.py"))  # LightningModule.all_gather
    room = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return "" if room in ("lightning", "chaos_lightning") else _site(frame)


def _asking(skipped: Collection[str]) -> FrameType:
    frame = sys._getframe(2)
    while frame.f_back is not None and os.path.basename(frame.f_code.co_filename) in skipped:
        frame = frame.f_back
    return frame


def _site(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}"


def reduced(values: Sequence[Tensor], op: str) -> Tensor:
    """Returns one tensor reduced from the members' tensors in rank order. Low precision is summed in float32; a mean
    of integers is a float.
    """
    op = op.lower()
    first = values[0]
    if any(v.shape != first.shape for v in values):
        raise DisagreementError(
            f"a reduce found tensors of shapes {[tuple(v.shape) for v in values]}; expected one shape"
        )
    stacked = torch.stack([v.to(first.dtype) for v in values])
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    if op == "product":
        return stacked.prod(0)
    if op not in ("mean", "avg", "sum"):
        raise UnsupportedError(f"reduce with {op!r} is not supported; expected sum, mean, min, max or product")
    if not stacked.dtype.is_floating_point and not stacked.dtype.is_complex:
        total = stacked.sum(0)
        return total if op == "sum" else total.to(torch.get_default_dtype()) / len(values)
    wide = stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked
    total = wide.sum(0)
    return (total if op == "sum" else total / len(values)).to(first.dtype)


class Collectives:
    """Collectives of one fit: each is a numbered slot of the job.

    Args:
        gather: Exchanges bytes under a name, for a line of the user's code ("": the one that calls now); None if this
            member is not in the job.
        device: Returns the device that tensors of answers go to.
        reduce: The strategy's `reduce`, with which `self.log` reduces.
    """

    def __init__(self, gather: Gather, device: Callable[[], torch.device], reduce: Callable[..., Any]) -> None:
        self._gather = gather
        self._device = device
        self._reduce = reduce
        self._in_step = self._in_unit = False
        self._waiting: list[tuple[str, Tensor]] = []
        self._line = ""
        """Line of the user's code that was the first one in this hook to ask for a reduce."""
        self._hook = ""
        self.syncs: set[str] = set()
        """Hooks among "training_step" and "validation_step" in which some member has asked for a reduce; then each
        batch has one exchange."""
        self._owed: tuple[str, _ResultCollection] | None = None

    # ------------------------------------------------------------------ plain collectives

    def exchange(self, name: str, value: Any, line: str = "") -> list[Any] | None:
        """Exchanges one value under a name; returns all members' values in rank order, None if this member is not in
        the job.
        """
        if self._in_unit:
            raise UnsupportedError(
                f"{name}: collectives inside {self._hook} are not supported with pipelines, since members run other "
                "micro-batches and layers there, some of them again after a failure; move it to on_train_batch_end or "
                "to the end of the epoch. All members get what self.log is given, with sync_dist=True or without"
            )
        if self._in_step:
            raise UnsupportedError(
                f"{name}: collectives inside {self._hook} are not supported (only self.log(..., "
                "sync_dist=True) is), since "
                "members without samples do not run it; move it to on_train_batch_end or to the end of the epoch"
            )
        answers = self._gather(name, encode_payload(value), line)
        if answers is None:
            return None
        if any(not data for _, data in answers) and name not in _LOGGED.values():
            silent = ", ".join(member for member, data in answers if not data)
            raise DisagreementError(
                f"{name}: {silent} had no samples in this micro-batch and makes other collectives; members must make "
                "the same ones in the same order, except in training_step"
            )
        return [decode_payload(data, self._device()) if data else None for _, data in answers]

    def meet(self, name: str) -> set[str] | None:
        """Meets the other members at the point `name`; returns the ids of all that came, None if this member is not
        in the job.
        """
        answers = self._gather(name, b"", "")
        return None if answers is None else {member for member, _ in answers}

    def barrier(self, name: str | None) -> None:
        """Waits until all members have come to this barrier."""
        self.exchange(f"barrier {name or call_site()}", None)

    def broadcast(self, value: Any, source: int) -> Any:
        """Returns the value of rank `source`. Every member sends its own value: if the source dies, that of its
        successor is returned.
        """
        answers = self.exchange(f"broadcast at {call_site()}", value)
        if answers is None:
            return value
        return answers[source] if source < len(answers) else answers[0]

    def reduce(self, value: Any, op: str) -> Any:
        """Returns a tensor reduced over all members. A value that is no tensor is returned unchanged, as with DDP."""
        if not isinstance(value, Tensor):
            return value
        if self._in_step and not self._in_unit:
            kept = value.detach()
            if op.lower() in ("mean", "avg") and not kept.dtype.is_floating_point:
                kept = kept.to(torch.get_default_dtype())
            self._line = self._line or users_line()
            self._waiting.append((op, kept))
            return kept
        answers = self.exchange(f"reduce {op} at {call_site()}", value)
        return value if answers is None else reduced(answers, op)

    def all_gather(self, value: Tensor) -> Tensor:
        """Returns the members' tensors, stacked in rank order."""
        answers = self.exchange(f"all_gather at {call_site()}", value)
        if answers is None:
            return value.unsqueeze(0)
        shapes = {tuple(a.shape) for a in answers}
        if len(shapes) > 1:
            raise DisagreementError(
                f"all_gather at {call_site()} found shapes {sorted(shapes)}; pad to one shape, since the last "
                "batch of an "
                "epoch may be smaller at some members"
            )
        return torch.stack(answers)

    def decide(self, decision: bool, every: bool) -> bool:
        """Returns whether all members (or any member, unless `every`) decided True."""
        answers = self.exchange(f"decision at {call_site()}", bool(decision))
        if answers is None:
            return bool(decision)
        return all(answers) if every else any(answers)

    # ------------------------------------------------------------------ inside training_step

    @property
    def in_step(self) -> bool:
        return self._in_step

    def enter_step(self, hook: str) -> None:
        self._in_step, self._hook, self._waiting, self._line = True, hook, [], ""

    @contextmanager
    def inside(self, hook: str) -> Iterator[None]:
        """Collects the values that the user's hook reduces within this context, for `leave_step` to exchange. If the
        hook raises, they are dropped.
        """
        self.enter_step(hook)
        try:
            yield
        except BaseException:
            self._in_step, self._waiting, self._owed = False, [], None
            raise

    @contextmanager
    def within_unit(self, hook: str) -> Iterator[None]:
        """Refuses every collective that the user's hook makes within this context, as a unit of a pipeline runs it
        (protocol.md P17).
        """
        before = self._in_step, self._in_unit, self._hook
        self._in_step, self._in_unit, self._hook = True, True, hook
        try:
            yield
        finally:
            self._in_step, self._in_unit, self._hook = before

    def leave_step(self, collection: _ResultCollection, *, always: bool = False, stood_in: bool = False) -> None:
        """Exchanges the values that the hook has reduced, in one collective after the step.

        Args:
            collection: Values that `self.log` keeps; a member that had no samples gets the others' values there.
            always: Whether to exchange even if there is nothing to: then all learn whether there is.
            stood_in: Whether this member had no samples and did not run the hook: only the others know what was logged.
        """
        waiting, self._waiting, self._in_step = self._waiting, [], False
        if not waiting and not always and self._hook not in self.syncs:
            self._owed = (self._hook, collection) if stood_in else None
            return
        mine, anonymous = {}, 0
        for op, tensor in waiting:
            key, described = results.found(collection, tensor)
            if not key:  # no value that `self.log` keeps: a reduce of the user's own
                key, anonymous = f"#{anonymous}", anonymous + 1
            mine[key] = [op, tensor, described]
        answers = self.exchange(_LOGGED[self._hook], mine, self._line)
        if answers is not None:
            self._take(self._hook, collection, mine, answers)

    def _take(
        self,
        hook: str,
        collection: _ResultCollection,
        mine: Mapping[str, list[Any]],
        answers: Sequence[Mapping[str, list[Any]] | None],
    ) -> None:
        """Stores exchanged values under the keys under which they were logged; each is reduced over the members that
        logged it.
        """
        logged = [answer for answer in answers if answer]
        if logged:
            self.syncs.add(hook)
        unnamed = [sorted(key for key in answer if key.startswith("#")) for answer in logged]
        if any(keys != unnamed[0] for keys in unnamed):
            raise DisagreementError(
                f"members reduced {sorted({len(keys) for keys in unnamed})} values in one {hook}, besides what they "
                "logged; every member that has samples must reduce the same ones"
            )
        for key in dict.fromkeys(key for answer in logged for key in answer):
            parts = [answer[key] for answer in logged if key in answer]
            ops = {op for op, _, _ in parts}
            if len(ops) > 1:
                raise DisagreementError(
                    f"{key!r} is logged in {hook} with different reductions by different members: {sorted(ops)}; "
                    "log it with one reduce_fx"
                )
            value = reduced([tensor for _, tensor, _ in parts], parts[0][0])
            if key in mine:
                mine[key][1].copy_(value)
            elif parts[0][2] is not None:
                results.fill(collection, key, parts[0][2], value, self._reduce)

    @property
    def owes(self) -> bool:
        """Whether the other members may exchange values logged in a step that this member, without samples, did not
        run.
        """
        return self._owed is not None

    def went_along(self, name: str, payloads: Sequence[bytes]) -> None:
        """Takes in the values that the others logged, from a slot that they closed while this member was about to
        fill a later one. Any other slot is an error.
        """
        if self._owed is None or name != _LOGGED[self._owed[0]]:
            raise DisagreementError(
                f"the others are at {name!r}, where this member, which had no samples in this micro-batch, is not; all "
                "members must make the same collectives in the same order, except in training_step"
            )
        self._take(*self._owed, {}, [decode_payload(data, self._device()) for data in payloads if data])

    def settled(self) -> None:
        """Notes that a slot closed with this member's contribution, so the others exchange no more values of an
        earlier step.
        """
        self._owed = None
