"""Decides, at one member, where and when the last member keeps the state in a file, and whether it fits a new start
(protocol.md 14c).

Theory of operation. The folder is the job's on this machine: beside the chain's file, or where `on_last_exit` says.
Each keeper has a folder of its own in there, so that two that go at once do not write over each other. Views compare
within a chain only, so each run removes nothing but its own states, and a hello names one of the chain that this
process was told of, else of the one that was kept last. It is the newest that fits: written for this job by the same
program with the same settings. What does not fit is named on the terminal, once, and left alone. A script that has
loaded a checkpoint goes on from a kept state only if that state stands on this very checkpoint, which is then older: a
record names the checkpoints that were saved before it, by the hashes of their headers. A state stays until a newer one
of its chain is kept or that job is finished: the scheduler sees to it that only one of its own chain is gone on from,
and that nobody takes an older one for the newest.

Members of a pipeline write the parts that they hold, each into its own folder, at one header and under one view, so
that their files belong together (P13). A process offers one of these: its own, if its name says so, else one that no
other process on this machine offers. It loads all parts in it, and gets others that it owns from other members. A state
in parts stays until the job goes on from a newer one, since the files of a parting may be incomplete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_lightning.control.options import FINAL, HOSTED, folder_beside
from chaos_lightning.errors import ChaosError, StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.sweeps import sweep_run
from chaos_lightning.member.events import committed_fields
from chaos_lightning.member.part_moves import HeldParts
from chaos_lightning.membership.parts import REST, common, division, numbers
from chaos_lightning.planning.pipelines.request import read_request
from chaos_lightning.protocol.codec import decode, encode
from chaos_lightning.protocol.spans import subtract, union
from chaos_lightning.protocol.types import MAX_PARTS, WHOLE, Header, Hello, Kept, Saved, Span, View, ViewId, kept_header
from chaos_lightning.replication import kept as files
from chaos_lightning.replication.access import StateAccess
from chaos_lightning.replication.part_state import PartAccess, part_hashes, part_name
from chaos_lightning.replication.table import state_hash
from chaos_lightning.service.sqlite_store import FileLock
from chaos_lightning.settings import ON_LAST_EXIT, EngineConfig

_log = logging.getLogger("chaos_lightning")

MAX_CHECKPOINTS = 1000
"""Number of checkpoints that a job remembers; the oldest ones are forgotten first."""


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """Checkpoint that the user's script loaded before it joined.

    Attributes:
        step: Step of the checkpoint.
        head: Hash of its header (protocol.md 4a); "" if the file does not say.
    """

    step: int = 0
    head: str = ""


def remembered(checkpoints: Sequence[str], head: str) -> list[str]:
    """Returns the header hashes of the checkpoints saved so far, with one that is being saved now."""
    return [*(h for h in checkpoints if h != head), head][-MAX_CHECKPOINTS:]


class SavedCheckpoints:
    """Checkpoints from which the present state descends.

    Attributes:
        heads: Hashes of their headers.
        loaded: The one that the script has loaded.
    """

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.loaded: LoadedCheckpoint | None = None

    def load(self, said: Mapping[str, Any]) -> None:
        """Notes that the script loads a checkpoint; `said` is what its file states about itself."""
        self.loaded = LoadedCheckpoint(int(said.get("step", 0)), str(said.get("head", "")))
        self.heads = list(said.get("checkpoints", ()))

    def at(self, head: str) -> list[str]:
        """Returns the checkpoints' header hashes and the present header's hash, since a checkpoint may be saved at that
        header too.
        """
        return remembered(self.heads, head)


def folder_of(config: EngineConfig) -> Path | None:
    """Returns the folder in which this job's last state is kept on this machine; None if none is to be kept."""
    if config.on_last_exit == "none":
        return None
    if config.on_last_exit not in ON_LAST_EXIT:
        return Path(config.on_last_exit) / f"{config.job}-{split_endpoint(config.endpoints[0])[1]}"
    return folder_beside(os.environ.get(HOSTED["store"].variable, ""), config.job, config.endpoints[0])


class Keeping:
    """Kept states on one member's machine: offers, loads, writes and removes them."""

    def __init__(self, config: EngineConfig, events: EventLog) -> None:
        self._job = config.job
        self._folder = folder_of(config)
        self._finished_s = config.finished_s
        self._goes_back = config.resume_from == "checkpoint"
        self._run = sweep_run()
        self._events = events
        self._told: set[str] = set()
        self._offered: tuple[Kept, files.StateOnDisk] | None = None
        self._name = config.name
        self._claim: tuple[Path, FileLock] | None = None
        """Folder with parts that this process offers, and the lock on it: others on this machine offer other ones."""
        self.held: HeldParts | None = None
        """Parts of the state in this process, if it is of a pipeline."""

    # ------------------------------------------------------------------ coming

    def offer(self, hello: Hello, loaded: LoadedCheckpoint | None = None) -> Kept | None:
        """Returns the newest kept state on this machine from which this process may resume.

        Args:
            hello: Tells what that is.
            loaded: The checkpoint that the script has loaded. It counts instead, unless the state goes on from it.
        """
        self._forget_final()
        found = []
        for record in self._records(final=True):
            try:
                found.append((self._checked(record, hello), record))
            except ChaosError as error:
                if record.folder.name != FINAL:
                    self._warn(f"{error}; it is not used. Remove {record.folder} to be rid of it")
        self._offered = None
        goes_on = [f for f in found if loaded is None or self._goes_on_from(loaded, f[1])]
        if not goes_on:
            if found and loaded is not None:
                self._warn_of_checkpoint(loaded, *max(found, key=lambda f: float(f[1].said.get("time", 0.0))))
            return None
        found = goes_on
        # Views of different chains do not compare: the chain that this process was told of, else the one kept last.
        chains = [kept.chain for kept, _ in sorted(found, key=lambda f: float(f[1].said.get("time", 0.0)))]
        chain = hello.chain if hello.chain in chains else chains[-1]
        mine = [f for f in found if f[0].chain == chain]
        self._offered = max(mine, key=lambda f: (f[0].header.view, f[0].header.seq))
        if self.held is not None:
            self._offered = self._claimed([f for f in mine if f[0].header.hash == self._offered[0].header.hash])
        if self._offered is None:
            return None
        kept, record = self._offered
        if loaded is not None and record.folder.name != FINAL:
            self._warn(
                f"the state that {kept.member} kept at {_step_of(record.said)} ({record.path}) goes on from the "
                f"checkpoint of step {loaded.step} that this script has loaded, so it counts. To go back to the "
                "checkpoint: resume_from='checkpoint' (CHAOS_RESUME_FROM)"
            )
        return kept

    def _claimed(self, found: Sequence[tuple[Kept, files.StateOnDisk]]) -> tuple[Kept, files.StateOnDisk] | None:
        """Locks and returns the first of these states that no other process on this machine offers, this member's own
        first; None if all are locked.
        """
        if self._claim is not None:
            if mine := [f for f in found if f[1].folder == self._claim[0]]:
                return mine[0]
            self.close()
        for kept, record in sorted(found, key=lambda f: (f[0].member.partition("~")[0] != self._name, f[0].member)):
            lock = FileLock(record.folder)
            if lock.take():
                self._claim = record.folder, lock
                return kept, record
            lock.close()
        return None

    def close(self) -> None:
        """Unlocks the file of parts that this process offered, so that other processes can offer it. Idempotent."""
        if self._claim is not None:
            self._claim[1].close()
            self._claim = None

    def _goes_on_from(self, loaded: LoadedCheckpoint, record: files.StateOnDisk) -> bool:
        """Returns whether a kept state takes precedence over the loaded checkpoint: it descends from that checkpoint,
        and the user does not want to go back.
        """
        if record.folder.name == FINAL:
            return True  # nothing is left to train
        return not self._goes_back and bool(loaded.head) and loaded.head in record.said.get("checkpoints", ())

    def _warn_of_checkpoint(self, loaded: LoadedCheckpoint, kept: Kept, record: files.StateOnDisk) -> None:
        if self._goes_back:
            why = "by resume_from='checkpoint'"
        elif loaded.head:
            why = "for that state does not go on from this checkpoint"
        else:
            why = "for it does not say of which step of this job it is"
        self._warn(
            f"this process starts from what its script has loaded, {why}; the state that {kept.member} kept at "
            f"{_step_of(record.said)} ({record.path}) is not used. To go on from it, start without a checkpoint"
        )

    def load(self, header: Header, state: StateAccess) -> None:
        """Loads the kept state that this member offered, from which it founds the job.

        Raises:
            StateError: The kept state is not there any more, or damaged; the message says what to do.
        """
        kept, record = self._offered or (None, None)
        if kept is None or record is None or kept.header.hash != header.hash:
            raise StateError(f"the state kept at step {header.step} is not on this machine any more; start again")
        try:
            files.load(record, state)
            parts = self._load_parts(record)
        except StateError as error:
            bad = record.folder.with_name(f"{record.folder.name}.bad")
            record.folder.replace(bad)
            raise StateError(
                f"the state that {kept.member} kept at {_step_of(record.said)} cannot be used: {error}; it was put "
                f"aside as {bad}. Start again: the job then begins anew, or from a checkpoint"
            ) from error
        age_s = max(0.0, time.time() - float(record.said.get("time", 0.0)))
        # For readers of the logs this slot joins the two parts of the run.
        self._events.emit("committed", **committed_fields(header, (), duration_s=0.0))
        whole = REST if record.said.get("parts") else ""
        self._say_hashes(header, {whole: state_hash(state.tensors()), **part_hashes(parts.values())})
        if whole == REST:
            self._remove_older(header, kept.chain, record.folder)
        about = {"parts": kept.parts} if whole == REST else {}
        self._events.emit(
            "resumed_kept", step=header.step, seq=header.seq, keeper=kept.member, path=str(record.path), **about
        )
        _log.warning(
            "job %s goes on from %s: %s kept its training state %s ago, as the last member (%s)",
            self._job, _step_of(record.said), kept.member, _ago(age_s), record.path,
        )  # fmt: skip

    # ------------------------------------------------------------------ going

    def keep(
        self,
        last: Header,
        view: View,
        member: str,
        hello: Hello,
        state: StateAccess,
        checkpoints: Sequence[str] = (),
        counted: int | None = None,
        divided: tuple[ViewId, Sequence[Span]] | None = None,
    ) -> Kept | None:
        """Writes the state at header `last` to a file, with the header hashes of the checkpoints that it descends from.

        Args:
            last: Header that the state stands on.
            view: The present view.
            member: Id of this member.
            hello: Hello of this member, which describes its training.
            state: State to write; in a pipeline, the rest of it besides the parts.
            checkpoints: Header hashes of these checkpoints.
            counted: Steps as the script counts them, with those before the job began; None: the job's own.
            divided: View in which `last` was closed and the parts that are here, in a pipeline; else None.

        Returns:
            Description of the kept state. If nothing is to be kept or can be, None; where there are pipelines it has no
            parts.
        """
        steps = {"step": last.step, "counted": last.step if counted is None else counted}
        closed, held = divided or (view.id, WHOLE)
        header, mine = kept_header(last, closed), self._named(view, held)
        nothing = Kept(header, member, view.chain, ()) if view.pipelines else None
        if self._folder is None:
            _log.warning(
                "%s: the training state of job %s at %s ends with this process, by on_last_exit='none'",
                member, self._job, _step_of(steps),
            )  # fmt: skip
            return nothing
        if view.pipelines and not mine.keys() - {REST}:
            return nothing  # it stands by, and all others have the rest, too
        said = {
            "job": self._job,
            "member": member,
            "chain": view.chain,
            "run": self._run,
            "time": time.time(),
            **steps,
            "header": encode(header).hex(),
            "checkpoints": list(checkpoints),
            **({"parts": mine} if mine else {}),
            **_terms(hello),
        }
        folder = self._folder / re.sub(r"[^A-Za-z0-9._~-]", "_", member)
        try:
            record = files.write(folder, header.hash, header.seq, state, said, self._states(mine))
        except StateError as error:
            self._events.emit("error", what="keep", reason=str(error))
            _log.error("%s was the last one with the training state at %s, and %s", member, _step_of(steps), error)
            return nothing
        if not mine:
            self._remove_older(header, view.chain, folder)
        whole = REST if mine else ""
        self._say_hashes(header, {whole: record.state_hash, **{n: p.state_hash for n, p in record.parts.items()}})
        self._events.emit("kept", step=last.step, seq=header.seq, head=header.hash, path=str(record.path))
        what, then = _words_of_parts(view, hello, held)
        _log.warning(
            "%s: %sthe training state of job %s at %s is kept in %s; the next start goes on from it%s",
            member, what, self._job, _step_of(steps), record.path, then,
        )  # fmt: skip
        return Kept(header, member, view.chain, tuple(held))

    def clear(self, chain: str) -> None:
        """Removes the kept states of a chain whose job is finished, from which nothing may resume."""
        for record in self._records():
            if (record.said.get("job"), record.said.get("chain")) == (self._job, chain):
                files.remove(record.folder)

    # ------------------------------------------------------------------ the end

    def final_lock(self) -> FileLock | None:
        """Takes the lock on the final state; the member that closes the job holds it until that state is written.

        Returns:
            None if another member of this machine has it, or no final state is to be kept.
        """
        if self._folder is None or self._finished_s <= 0:
            return None
        lock = FileLock(self._folder / FINAL)
        if lock.take():
            return lock
        lock.close()
        return None

    def lacks_final(self, step: int, saved: Saved | None, member: str) -> None:
        """Warns that latecomers cannot get the final state of a pipeline, which no member has as a whole.

        Args:
            step: Its step.
            saved: The newest checkpoint of the job; if it is of that step, nothing is lost, and nothing said.
            member: The one that says it.
        """
        if self._folder is None or self._finished_s <= 0 or (saved is not None and saved.step == step):
            return
        reason = f"no checkpoint holds the job's final state, of step {step}, of which each member has parts"
        self._events.emit("error", what="keep", reason=reason)
        _log.warning("%s: %s; who comes late does not get it", member, reason)

    def keep_final(self, header: Header, view: View, member: str, hello: Hello, state: StateAccess) -> None:
        """Writes the state at the job's end to a file, for latecomers."""
        assert self._folder is not None
        said = {
            "job": self._job,
            "member": member,
            "chain": view.chain,
            "time": time.time(),
            "step": header.step,
            "header": encode(header).hex(),
            **_terms(hello),
        }
        files.remove(self._folder / FINAL)
        try:
            files.write(self._folder / FINAL, header.hash, header.seq, state, said)
        except StateError as error:
            self._events.emit("error", what="keep", reason=str(error))
            _log.warning("%s: who comes late to the finished job does not get its final state: %s", member, error)

    def load_final(self, chain: str, hello: Hello, state: StateAccess, deadline: float) -> Header | None:
        """Loads the final state of a finished job, if it is on this machine.

        Args:
            chain: Id of the job's chain.
            hello: Hello of this process, which describes its training.
            state: State into which the final state is loaded.
            deadline: Time by `time.monotonic()`, s. A state that is being written is waited for until then.

        Returns:
            The job's last header; None if there is no such state, or it cannot be used: then `state` may be a mixture.
        """
        if self._folder is None or not self._folder.is_dir():
            return None
        lock = FileLock(self._folder / FINAL)
        try:
            if not lock.take(max(0.0, deadline - time.monotonic())):
                return None
            record = files.read(self._folder / FINAL)
            kept = self._checked(record, hello)
            if kept.chain != chain:
                return None
            files.load(record, state)
        except ChaosError as error:
            self._warn(f"the final state of the job is not loaded: {error}")
            return None
        finally:
            lock.close()
        return kept.header

    def _forget_final(self) -> None:
        """Removes the final state once the time for latecomers (`finished_s`) is over."""
        if self._folder is None or not (self._folder / FINAL / files.RECORD).exists():
            return
        with contextlib.suppress(StateError):
            age_s = time.time() - float(files.read(self._folder / FINAL).said.get("time", 0.0))
            if not 0 <= age_s <= self._finished_s:
                files.remove(self._folder / FINAL)

    # ------------------------------------------------------------------ inside

    def _named(self, view: View, held: Sequence[Span]) -> dict[str, int]:
        """Returns the numbers of these parts by name; an empty dict if the job has no pipelines."""
        names = division(view).names if view.pipelines else ()
        return {names[part]: part for part in numbers(held)} if names else {}

    def _states(self, names: Mapping[str, int]) -> dict[str, PartAccess]:
        """Returns access to those of these parts that have tensors, except the part `rest`."""
        if not names:
            return {}
        assert self.held is not None, "a member of a pipeline without parts"
        return {state.part: state for state in self.held.states([name for name in names if name != REST])}

    def _load_parts(self, record: files.StateOnDisk) -> dict[str, PartAccess]:
        """Loads the parts in this record into this process's state, and returns access to them.

        Raises:
            StateError: The parts do not fit.
        """
        names = record.said.get("parts", {})
        if names and self.held is not None:
            self.held.room([name for name in names if name != REST])
        states = self._states(names)
        if states.keys() != record.parts.keys():
            odd = min(states.keys() ^ record.parts.keys())
            raise StateError(f"{odd} has tensors either in this process or in {record.folder}; expected both")
        for name, state in states.items():
            files.load(record.parts[name], state)
        return states

    def _remove_older(self, header: Header, chain: str, but: Path) -> None:
        """Removes kept states of the chain that are older than this header."""
        for other in self._records():
            whose = (other.said.get("job"), other.said.get("chain"))
            if other.folder != but and whose == (self._job, chain) and _older(other, header):
                files.remove(other.folder)

    def _say_hashes(self, header: Header, hashes: Mapping[str, str]) -> None:
        """Logs the hashes of a kept state, which the audit compares with the state from which the job resumes.

        Args:
            header: Header that the state is of, on which the job is founded.
            hashes: Hashes by name of the part; "" is the whole state.
        """
        for name, value in hashes.items():
            head = part_name(header, name) if name else header.hash
            self._events.emit("state_hash", seq=header.seq, step=header.step, head=head, hash=value)

    def _records(self, *, final: bool = False) -> list[files.StateOnDisk]:
        found = []
        for path in sorted(self._folder.glob(f"*/{files.RECORD}")) if self._folder is not None else ():
            if path.parent.name.endswith(".bad") or (path.parent.name == FINAL and not final):
                continue
            try:
                found.append(files.read(path.parent))
            except StateError as error:
                self._warn(f"{error}; it is not used")
        return found

    def _checked(self, record: files.StateOnDisk, hello: Hello) -> Kept:
        """Checks that this process may resume from the state in this record, and returns its description.

        Raises:
            ChaosError: This process may not resume from it; the message says why.
        """
        said = record.said
        what = f"the state kept at {_step_of(said)} by {said.get('member')} ({record.path})"
        parts = said.get("parts")
        divided = parts is not None or bool(record.parts)
        if divided and self.held is None:
            raise StateError(f"{what} is one member's part of a pipeline; this process trains the model as a whole")
        if not divided and self.held is not None:
            raise StateError(f"{what} is that of the whole model; this process is to hold parts of it")
        if said.get("job") != self._job:
            raise StateError(f"{what} is of job {said.get('job')!r}, not of {self._job!r}")
        if (theirs := said.get("run", "")) != self._run:
            raise StateError(f"{what} is of {_words_of_run(theirs)}, and this is {_words_of_run(self._run)}")
        for name, mine in _terms(hello).items():
            theirs = said.get(name)
            if theirs == mine:
                continue
            if isinstance(mine, dict) and isinstance(theirs, dict):
                name = next(k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k))
                mine, theirs = mine.get(name), theirs.get(name)
            raise StateError(f"{what} does not fit: its {name} is {theirs}, this process has {mine}")
        try:
            header = decode(Header, bytes.fromhex(str(said.get("header"))))
        except ValueError as error:
            raise StateError(f"{what} has no header ({error})") from error
        return Kept(header, str(said.get("member")), str(said.get("chain")), _spans(what, parts))

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning(text)


def _spans(what: str, parts: object) -> tuple[Span, ...]:
    """Returns the numbers of the parts that a record names, as spans."""
    if parts is None:
        return WHOLE
    found = list(parts.values()) if isinstance(parts, dict) else [-1]
    if not all(type(part) is int and 0 <= part < MAX_PARTS for part in found):
        raise StateError(f"{what} names no parts")
    return union((part, part + 1) for part in found)


def _words_of_parts(view: View, hello: Hello, held: Sequence[Span]) -> tuple[str, str]:
    """Describes in words which layers a file has, and which other files a start needs; two empty texts if the file has
    all layers.
    """
    parts, layers = division(view), read_request(hello.pipelines).layer_names if hello.pipelines else ()
    whole = ((0, parts.layer_count),)
    missing = subtract(whole, held) if view.pipelines else ()
    if not missing:
        return "", ""
    needs = f" only with files of other members that have {parts.words(missing, layers)} at that step, too"
    return f"a part ({parts.words(common(whole, held), layers)}) of ", needs


def _step_of(said: Mapping[str, Any]) -> str:
    """Describes the step as the script counts it, and as the job does if that differs."""
    step, counted = said.get("step"), said.get("counted", said.get("step"))
    return f"step {step}" if counted == step else f"step {counted} (step {step} of this job)"


def _words_of_run(run: str) -> str:
    return f"the run {run} of a sweep" if run else "no run of a sweep"


def _terms(hello: Hello) -> dict[str, Any]:
    """Returns the facts that a kept state and a process must have in common, as plain JSON values."""
    return {"package": hello.package, "accumulate": hello.accumulate, "fingerprint": dict(hello.fingerprint)}


def _older(record: files.StateOnDisk, header: Header) -> bool:
    """Returns whether a record is older than this header; False for one written at the same moment by another member,
    or each would remove the other's.
    """
    try:
        its = decode(Header, bytes.fromhex(str(record.said.get("header"))))
    except (ValueError, ChaosError):
        return True
    return (its.view, its.seq) < (header.view, header.seq)


def _ago(seconds: float) -> str:
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
