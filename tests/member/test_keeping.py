"""Tests the state that a last member keeps in a file, with damaged files and full disks."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served import hello

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import SchedulerOptions, default_store
from chaos_lightning.control.resetting import reset_job
from chaos_lightning.errors import StateError
from chaos_lightning.events.events import EventLog
from chaos_lightning.member.keeping import MAX_CHECKPOINTS, Keeping, LoadedCheckpoint, folder_of, remembered
from chaos_lightning.membership.effects import Persist
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    Hello,
    Kept,
    Kind,
    Member,
    Saved,
    Settings,
    Span,
    View,
    ViewId,
)
from chaos_lightning.replication import ModuleState, StateAccess
from chaos_lightning.replication import kept as files
from chaos_lightning.replication.part_state import PartState
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.settings import EngineConfig
from chaos_lightning.trainer import has_stepped

ENDPOINT = "127.0.0.1:9"
"""Endpoint at which no process listens."""
MEMBER = Member("a~1", "a", "host", "127.0.0.1", 1)


def state(seed: int = 0) -> StateAccess:
    torch.manual_seed(seed)
    return ModuleState(torch.nn.Linear(64, 64))


def values(of: StateAccess) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in of.tensors()]


def keeping(resume_from: str = "newest") -> Keeping:
    return Keeping(EngineConfig(endpoint=ENDPOINT, resume_from=resume_from), EventLog(None))


def keep(
    what: StateAccess, chain: str = "chain", member: str = "a~1", view: int = 1, checkpoints: Sequence[str] = ()
) -> Kept | None:
    stood = View(ViewId(1, view), NO_VIEW, (MEMBER,), chain=chain)
    return keeping().keep(GENESIS, stood, member, said(), what, checkpoints)


def said() -> Hello:
    return hello("a")


def folder() -> Path:
    return default_store("default", 9).parent / "kept"


def test_a_kept_state_is_gone_on_from() -> None:
    kept, fresh = keep(state(1)), state(2)
    assert kept is not None
    founder = keeping()
    assert founder.offer(said()) == kept
    founder.load(kept.header, fresh)
    assert all(torch.equal(a, b) for a, b in zip(values(fresh), values(state(1)), strict=True))


def test_states_of_several_chains_are_not_compared_by_their_views() -> None:
    """From two chains' states the one written last is offered, although the other has a higher view number."""
    before = keep(state(1), chain="day1", member="a~9", view=9)
    now = keep(state(2), chain="day2", view=1)
    assert keeping().offer(said()) == now, "the one written last"
    assert keeping().offer(replace(said(), chain="day1")) == before, "or the one of the chain that it was told of"
    newer = keep(state(3), chain="day2", member="b~2", view=2)
    assert keeping().offer(said()) == newer
    assert sorted(p.name for p in folder().iterdir()) == ["a~9", "b~2"], "only what is older in this chain is removed"
    keeping().clear("day2")
    assert [p.name for p in folder().iterdir()] == ["a~9"]


def test_jobs_of_one_name_do_not_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = [folder_of(EngineConfig(endpoint=f"127.0.0.1:{port}", on_last_exit="/data/kept")) for port in (9, 10)]
    stored = []
    for store in ("/data/a.sqlite", "/data/b.sqlite"):
        monkeypatch.setenv("CHAOS_STORE", store)
        stored.append(folder_of(EngineConfig(endpoint=ENDPOINT)))
    assert [str(p) for p in stated] == ["/data/kept/default-9", "/data/kept/default-10"]
    assert [str(p) for p in stored] == ["/data/a.sqlite-kept", "/data/b.sqlite-kept"]


def test_a_kept_state_counts_before_a_checkpoint_that_it_goes_on_from(caplog: pytest.LogCaptureFixture) -> None:
    kept = keep(state(1), checkpoints=["h20", "h40"])
    assert keeping().offer(said(), LoadedCheckpoint(20, "h20")) == kept
    with caplog.at_level(logging.WARNING):
        assert keeping().offer(said(), LoadedCheckpoint(40, "h40")) == kept
    assert "goes on from the checkpoint of step 40 that this script has loaded, so it counts" in caplog.text
    assert "To go back to the checkpoint: resume_from='checkpoint'" in caplog.text
    assert keeping("checkpoint").offer(said(), LoadedCheckpoint(40, "h40")) is None
    assert "starts from what its script has loaded, by resume_from='checkpoint'" in caplog.text
    assert keeping().offer(said(), LoadedCheckpoint(60, "h60")) is None, "the job went on after the state was kept"
    assert "for that state does not go on from this checkpoint" in caplog.text


def test_a_kept_state_belongs_to_one_run_of_a_sweep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A state kept in one run of a sweep is offered to that run only, not to other runs at the same endpoint."""

    def run(folder: str) -> None:
        monkeypatch.setattr("chaos_lightning.member.keeping.sweep_run", lambda: folder)

    outside = keep(state(1))
    run("/sweeps/monday/0")
    assert keeping().offer(said()) is None
    monday = keep(state(2), chain="day1", member="b~1")
    run("/sweeps/tuesday/0")
    assert keeping().offer(said()) is None
    assert "is of the run /sweeps/monday/0 of a sweep, and this is the run /sweeps/tuesday/0 of a sweep" in caplog.text
    run("/sweeps/monday/0")
    assert keeping().offer(said()) == monday, "one that was asked to go on in its folder does"
    run("")
    assert keeping().offer(said()) == outside


def test_of_several_kept_states_the_one_counts_that_goes_on_from_the_checkpoint() -> None:
    ours = keep(state(1), chain="day1", checkpoints=["h40"])
    keep(state(2), chain="day2", member="b~1", checkpoints=["other"])
    assert keeping().offer(said(), LoadedCheckpoint(40, "h40")) == ours


def test_a_job_remembers_so_many_checkpoints_and_each_once() -> None:
    heads: list[str] = []
    for number in range(MAX_CHECKPOINTS + 5):
        heads = remembered(heads, f"h{number}")
    assert len(heads) == MAX_CHECKPOINTS
    assert remembered(heads, "h900")[-2:] == [f"h{MAX_CHECKPOINTS + 4}", "h900"]
    assert len(remembered(heads, "h900")) == MAX_CHECKPOINTS


def test_a_checkpoint_of_an_unknown_step_counts(caplog: pytest.LogCaptureFixture) -> None:
    """A loaded checkpoint that does not state its step takes precedence over the kept state, with a warning."""
    kept = keep(state(1), checkpoints=["", "h40"])
    with caplog.at_level(logging.WARNING):
        assert keeping().offer(said(), LoadedCheckpoint()) is None
    assert "starts from what its script has loaded, for it does not say of which step of this job it is" in caplog.text
    assert "the state that a~1 kept at step 0" in caplog.text
    assert "is not used. To go on from it, start without a checkpoint" in caplog.text
    assert keeping().offer(said()) == kept


def test_a_kept_states_step_is_the_one_that_the_script_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Messages on a kept state count the steps before the checkpoint from which the job began."""
    stood = View(ViewId(1, 1), NO_VIEW, (MEMBER,), chain="chain")
    with caplog.at_level(logging.WARNING):
        kept = keeping().keep(replace(GENESIS, step=3), stood, "a~1", said(), state(1), ["h40"], counted=43)
        assert "the training state of job default at step 43 (step 3 of this job) is kept in" in caplog.text
        assert keeping().offer(said(), LoadedCheckpoint(40, "other")) is None
        assert "the state that a~1 kept at step 43 (step 3 of this job)" in caplog.text
        founder = keeping()
        assert founder.offer(said(), LoadedCheckpoint(40, "h40")) == kept
        assert kept is not None
        founder.load(kept.header, state(2))
    assert "job default goes on from step 43 (step 3 of this job): a~1 kept its training state" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped_is_told_from_a_fresh_one(kind: type[torch.optim.Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight], **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    assert not has_stepped(optimizer)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert has_stepped(optimizer)


def test_a_damaged_state_is_put_aside_and_told() -> None:
    kept = keep(state(1))
    assert kept is not None
    (path,) = folder().glob("*/*.state")
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"damaged")
    founder = keeping()
    assert founder.offer(said()) == kept  # its length is right; the bytes are looked at when they are needed
    with pytest.raises(StateError, match=r"cannot be used: .* put aside as .*\.bad\. Start again"):
        founder.load(kept.header, state(2))
    assert keeping().offer(said()) is None
    assert [p.name for p in folder().iterdir()] == ["a~1.bad"]


@pytest.mark.parametrize("what", ["short", "no record", "a record of nonsense"])
def test_half_of_a_state_is_none(caplog: pytest.LogCaptureFixture, what: str) -> None:
    assert keep(state(1)) is not None
    (path,), (record,) = folder().glob("*/*.state"), folder().glob("*/kept.json")
    if what == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "no record":
        record.unlink()
    else:
        record.write_text('{"version": 1, "said": []}')
    with caplog.at_level(logging.WARNING):
        assert keeping().offer(said()) is None
    assert ("is not used" in caplog.text) == (what != "no record")


@contextmanager
def no_room(nbytes: int) -> Iterator[None]:
    """Limits the size of files in the block, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_and_leaves_the_older_state(caplog: pytest.LogCaptureFixture) -> None:
    older = keep(state(1))
    with caplog.at_level(logging.ERROR), no_room(1000):
        assert keep(ModuleState(torch.nn.Linear(65, 65))) is None
    assert "was the last one with the training state at step 0, and" in caplog.text
    assert "File too large" in caplog.text
    assert not list(folder().glob("*/.*.part"))
    assert keeping().offer(said()) == older


def test_who_ends_a_job_removes_what_was_kept_of_its_chain(tmp_path: Path) -> None:
    path = tmp_path / "chain.sqlite"
    with JobChain(SqliteStore(path, "default")) as store:
        term = store.take_term()
        view = View(ViewId(term, 1), NO_VIEW, (MEMBER,))
        assert store.append(Persist(1, "view", view.id, view)).ok
        chain = store.tip().chain
    options = SchedulerOptions(listen=ENDPOINT, settings=Settings(job="default"), store=str(path))
    assert keep(state(1), chain="another") is not None
    assert keep(state(2), chain=chain, member="b~2") is not None
    words = reset_job(ENDPOINT, options, b"", force=True)
    assert f"The training state that was kept for it in {folder() / 'b~2'} is removed" in words
    assert [p.name for p in folder().iterdir()] == ["a~1"]


CLOSING = replace(GENESIS, kind=Kind.CLOSING, seq=9, step=7, view=ViewId(1, 1))


def end(what: StateAccess, chain: str = "chain") -> Keeping:
    """Writes the final state as the member that closes the job does; returns its `Keeping`."""
    made, stood = keeping(), View(ViewId(1, 1), NO_VIEW, (MEMBER,), chain=chain)
    lock = made.final_lock()
    assert lock is not None
    assert keeping().final_lock() is None, "one member of each machine writes"
    made.keep_final(CLOSING, stood, "a~1", said(), what)
    lock.close()
    return made


def test_who_comes_late_gets_the_final_state() -> None:
    end(state(1))
    fresh = state(2)
    assert keeping().load_final("chain", said(), fresh, 0.0) == CLOSING
    assert all(torch.equal(a, b) for a, b in zip(values(fresh), values(state(1)), strict=True))
    assert keeping().load_final("another", said(), state(2), 0.0) is None
    assert keeping().load_final("chain", replace(said(), fingerprint=(("x", "y"),)), state(2), 0.0) is None


def test_a_final_state_that_is_being_written_is_waited_for() -> None:
    end(state(1))
    lock = keeping().final_lock()
    assert lock is not None
    assert keeping().load_final("chain", said(), state(2), 0.0) is None
    lock.close()
    assert keeping().load_final("chain", said(), state(2), 0.0) == CLOSING


def test_a_founder_offers_the_final_state_whatever_checkpoint_it_has_loaded() -> None:
    keep(state(3), checkpoints=["h40"])
    end(state(1))
    for loaded in (None, LoadedCheckpoint(40, "h40"), LoadedCheckpoint()):
        offered = keeping().offer(said(), loaded)
        assert offered is not None
        assert offered.header == CLOSING
    keeping().clear("chain")
    assert [p.name for p in folder().iterdir() if p.is_dir()] == ["final"], "who closes the job later leaves it"


def test_a_final_state_goes_when_nobody_is_told_of_the_end_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    end(state(1))
    later = time.time() + 601.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert keeping().offer(said()) is None
    assert not (folder() / "final").exists()


def test_no_final_state_is_kept_where_nobody_would_be_told() -> None:
    assert Keeping(EngineConfig(endpoint=ENDPOINT, finished_s=0.0), EventLog(None)).final_lock() is None
    assert Keeping(EngineConfig(endpoint=ENDPOINT, on_last_exit="none"), EventLog(None)).final_lock() is None


LAYERS = ViewPipelines.of(PipelinePlan(2, (Pipeline((PlanStage("a~1", 0, 2),), 1),))).to_json()
IN_PARTS = View(ViewId(1, 1), NO_VIEW, (MEMBER,), chain="chain", pipelines=LAYERS)
"""Parts 0 and 1 are the layers, part 2 is the rest."""


class Held:
    """Model of two layers, of which the second one has no tensors, as a pipeline's member holds it."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        self.roomy: list[str] = []

    def states(self, names: Collection[str]) -> list[PartState]:
        return [PartState(n, self.net, ("0.weight", "0.bias"), ()) for n in names if n == "layer.0"]

    def room(self, names: Collection[str]) -> None:
        self.roomy += names

    def forget(self, names: Collection[str]) -> None: ...


def keeping_parts(seed: int = 0, name: str = "a") -> tuple[Keeping, Held]:
    made, held = Keeping(EngineConfig(endpoint=ENDPOINT, name=name), EventLog(None)), Held(seed)
    made.held = held
    return made, held


def keep_parts(seed: int = 0, member: str = "a~1", *, seq: int = 4, held: tuple[Span, ...] = ((0, 3),)) -> Kept | None:
    made, _ = keeping_parts(seed)
    last = replace(GENESIS, seq=seq, step=seq, view=ViewId(1, seq))
    return made.keep(last, IN_PARTS, member, said(), state(seed), divided=(last.view, held))


def test_parts_are_gone_on_from_and_those_of_an_older_parting_go_then() -> None:
    """The job resumes from the newest parts, and only then older files are removed, since the newer set might have been
    incomplete.
    """
    keep_parts(1, "b~1", seq=3)
    kept, rest = keep_parts(2, "a~2"), state(9)
    assert kept is not None
    assert (kept.parts, kept.header.view) == (((0, 3),), ViewId(1, 4))
    assert sorted(p.name for p in folder().glob("*~?")) == ["a~2", "b~1"]
    founder, held = keeping_parts(7)
    assert founder.offer(said()) == kept
    founder.load(kept.header, rest)
    assert held.roomy == ["layer.0", "layer.1"]
    assert all(torch.equal(a, b) for a, b in zip(values(rest), values(state(2)), strict=True))
    theirs = Held(2).net[0].weight
    assert torch.equal(held.net[0].weight, theirs)
    assert [p.name for p in folder().glob("*~?")] == ["a~2"]
    founder.close()


def test_whoever_holds_the_rest_alone_writes_nothing_and_tells_so() -> None:
    kept = keep_parts(held=((2, 3),))
    assert kept is not None
    assert kept.parts == ()
    assert not folder().exists() or not list(folder().glob("*/kept.json"))


def test_who_keeps_some_layers_says_which_and_which_files_a_start_needs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        keep_parts(held=((1, 3),))
        keep_parts(member="b~2")
    some, whole = caplog.messages
    assert some.startswith("a~1: a part (layer.1) of the training state of job default at step 4 is kept in ")
    assert some.endswith(
        "; the next start goes on from it only with files of other members that have layer.0 at that step, too"
    )
    assert whole.startswith("b~2: the training state of job default at step 4 is kept in ")
    assert whole.endswith("; the next start goes on from it")


def test_whoever_cannot_write_its_parts_tells_so(caplog: pytest.LogCaptureFixture) -> None:
    """A member that cannot write its parts reports that it has none, because other members wait for its report."""
    with caplog.at_level(logging.ERROR), no_room(100):
        kept = keep_parts()
    assert kept is not None
    assert kept.parts == ()
    assert "File too large" in caplog.text


def test_a_layer_without_tensors_is_kept_by_its_number() -> None:
    kept = keep_parts(held=((1, 3),))
    assert kept is not None
    founder, _ = keeping_parts()
    assert founder.offer(said()) == kept
    founder.load(kept.header, state(3))
    founder.close()


def test_a_part_that_is_not_in_its_file_is_refused_by_name() -> None:
    kept = keep_parts()
    assert kept is not None
    (record,) = folder().glob("*/kept.json")
    record.write_text(record.read_text().replace('"layer.0": 0', '"layer.1": 0'))
    founder, _ = keeping_parts()
    assert founder.offer(said()) is not None
    with pytest.raises(StateError, match=r"layer\.0 has tensors either in this process or in"):
        founder.load(kept.header, state(3))
    founder.close()


@pytest.mark.parametrize("numbers", ["-1", "131072", '"x"', "true"])
def test_a_record_that_names_no_parts_is_not_used(caplog: pytest.LogCaptureFixture, numbers: str) -> None:
    keep_parts()
    (record,) = folder().glob("*/kept.json")
    record.write_text(record.read_text().replace('"layer.1": 1', f'"layer.1": {numbers}'))
    founder, _ = keeping_parts()
    with caplog.at_level(logging.WARNING):
        assert founder.offer(said()) is None
    assert "names no parts" in caplog.text


def test_files_with_parts_and_files_of_the_whole_are_not_mixed_up(caplog: pytest.LogCaptureFixture) -> None:
    keep_parts(member="a~1")
    with caplog.at_level(logging.WARNING):
        assert keeping().offer(said()) is None
    assert "is one member's part of a pipeline; this process trains the model as a whole" in caplog.text
    keep(state(1), member="b~2")
    founder, _ = keeping_parts()
    with caplog.at_level(logging.WARNING):
        offered = founder.offer(said())
    assert offered is not None
    assert offered.member == "a~1"
    assert "is that of the whole model; this process is to hold parts of it" in caplog.text
    founder.close()


@pytest.mark.parametrize(("saved", "told"), [(None, True), (Saved(2, "a.ckpt"), True), (Saved(3, "b.ckpt"), False)])
def test_a_final_state_in_parts_is_told_of_if_no_checkpoint_holds_it(
    caplog: pytest.LogCaptureFixture, saved: Saved | None, told: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        keeping().lacks_final(3, saved, "a~1")
    said = "a~1: no checkpoint holds the job's final state, of step 3, of which each member has parts; who comes late"
    assert (said in caplog.text) is told
    assert told or not caplog.messages


def test_a_kept_state_with_parts_that_it_does_not_name_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = files.write
    monkeypatch.setattr(files, "write", lambda *given: write(*given[:-1], {"layer.0": state(2)}))
    assert keep(state(1)) is not None
    with caplog.at_level(logging.WARNING):
        assert keeping().offer(said()) is None
    assert "is one member's part of a pipeline" in caplog.text
