"""A follower's files: writes are interrupted, files are cut or have flipped bits, disks are full; each reported version
survives, or the loss is named.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError, StateError
from chaos_lightning.outer.exchange.kernel import OuterState
from chaos_lightning.outer.follower import shard_files
from chaos_lightning.outer.follower.shard_files import FolderContents, ShardFiles, ShardHead
from chaos_lightning.outer.rules.grid import Grid
from chaos_lightning.outer.rules.messages import ShardFile
from chaos_lightning.outer.rules.types import Counters, VersionId
from chaos_lightning.replication.parts import part_of

GRID = Grid((333, 0, 1, 65, 200, 64), 64)
SHARD = GRID.cut(2)[1]
COUNTERS = Counters(pending=3, samples=1 << 60, ticks=5)
OLD, NEW = VersionId(7, "7" * 32), VersionId(8, "8" * 32)


class Killed(BaseException):
    """Stands for SIGKILL: raised at a step, and caught by no cleanup code."""


def state(seed: int) -> OuterState:
    generator = torch.Generator().manual_seed(seed)
    return OuterState(SHARD, *(torch.randn(SHARD.elements, generator=generator) for _ in range(3)))


def bits(one: OuterState) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in one.tensors]


@pytest.fixture
def files(tmp_path: Path) -> ShardFiles:
    return ShardFiles(tmp_path / "disk", "job")


def restarted(files: ShardFiles) -> ShardFiles:
    return ShardFiles(files.folder.parent, files.job)


def test_the_names_of_a_followers_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, true = [], shard_files._sync_folder
    monkeypatch.setattr(shard_files, "_sync_folder", lambda folder: (synced.append(folder), true(folder)))
    made = ShardFiles(tmp_path / "new", "job")
    assert {tmp_path, tmp_path / "new", made.folder} == {*synced}


def test_what_was_saved_comes_back_and_is_found_at_the_next_start(files: ShardFiles) -> None:
    assert files.look() == FolderContents((), ())
    digests = [files.save(version, state(seed), COUNTERS) for seed, version in enumerate((NEW, OLD))]
    assert digests == [state(0).digest, state(1).digest]
    again = restarted(files)
    assert again.look() == FolderContents((ShardFile(OLD, digests[1]), ShardFile(NEW, digests[0])), ())
    loaded, counters = again.load(NEW, digests[0])
    assert bits(loaded) == bits(state(0))
    assert loaded.shard == SHARD
    assert counters == COUNTERS
    again.delete(NEW)
    again.delete(NEW)
    assert again.look().whole == (ShardFile(OLD, digests[1]),)


def test_a_file_is_one_of_safetensors(files: ShardFiles) -> None:
    files.save(NEW, state(0), COUNTERS)
    data = files.path(NEW).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    words = header.pop("__metadata__")
    assert all(isinstance(word, str) for word in words.values())
    assert (8 + length) % 8 == 0
    assert list(header) == ["theta", "momentum", "buffer"]
    for tensor, said in zip(state(0).tensors, header.values(), strict=True):
        start, stop = said["data_offsets"]
        assert (said["dtype"], said["shape"]) == ("F32", [SHARD.elements])
        assert data[8 + length + start : 8 + length + stop] == tensor.numpy().tobytes()
    assert len(data) == 8 + length + stop


# ---------------------------------------------------------------------- interrupted

STEPS: tuple[tuple[object, str], ...] = (
    (Path, "open"),
    (Path, "replace"),
    (os, "fsync"),
    (os, "open"),
    (os, "posix_fadvise"),
)


def interrupt(patch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]) -> list[str]:
    """Makes the file operation number `at` fail after all earlier ones have succeeded; returns the list of operations,
    which grows as they come.
    """
    seen: list[str] = []

    def wrap(name: str, true: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **kwargs: object) -> object:
            if str(args[0]).startswith("/proc"):
                return true(*args, **kwargs)  # a part's name tells its writer
            seen.append(name)
            if len(seen) > at:
                raise error()
            return true(*args, **kwargs)

        return step

    for owner, name in STEPS:
        patch.setattr(owner, name, wrap(name, getattr(owner, name)))
    return seen


def test_the_steps_of_a_save_are_in_order(files: ShardFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        seen = interrupt(patch, 100, Killed)
        files.save(NEW, state(0), COUNTERS)
    assert seen == ["open", "fsync", "replace", "open", "fsync", "open", "posix_fadvise"]


def test_a_start_syncs_the_folder_before_it_tells_what_lies_there(
    files: ShardFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower that was killed after renaming a file may not have synced the folder: the next start syncs it before
    it reports the file.
    """
    files.save(NEW, state(0), COUNTERS)
    synced: list[str] = []
    true = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        true(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        restarted(files)
    assert str(files.folder) in synced


@pytest.mark.parametrize("at", range(7))
def test_a_crash_between_any_two_steps_leaves_a_whole_file_or_none(
    files: ShardFiles, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    old = files.save(OLD, state(0), COUNTERS)
    with monkeypatch.context() as patch:
        interrupt(patch, at, Killed)
        with pytest.raises(Killed):
            files.save(NEW, state(1), COUNTERS)
    again = restarted(files)
    found = again.look()
    assert found.strange == ()
    renamed = (ShardFile(NEW, state(1).digest),) if at > 2 else ()
    assert found.whole == (ShardFile(OLD, old), *renamed)
    assert again.save(NEW, state(1), COUNTERS) == state(1).digest
    assert len(again.look().whole) == 2


@pytest.mark.parametrize("at", range(7))
def test_a_step_that_fails_is_an_error_and_leaves_no_part(
    files: ShardFiles, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    old = files.save(OLD, state(0), COUNTERS)
    with monkeypatch.context() as patch:
        interrupt(patch, at, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(StateError, match="No space left on device"):
            files.save(NEW, state(1), COUNTERS)
    assert ShardFile(OLD, old) in files.look().whole
    if at < 3:
        # Only reading back failed; if unlinking had failed, too, the part would be deleted at the next start.
        assert [path.name for path in files.folder.iterdir()] == [files.path(OLD).name]
    assert files.save(NEW, state(1), COUNTERS) == state(1).digest


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limits this process's files to 2,000 bytes, so that larger writes fail in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_a_write_that_ends_in_the_middle_leaves_nothing(files: ShardFiles) -> None:
    with pytest.raises(StateError, match="File too large"):
        files.save(NEW, state(1), COUNTERS)
    assert list(files.folder.iterdir()) == []


def test_what_a_dead_process_was_writing_goes_at_the_next_start(files: ShardFiles) -> None:
    name = part_of(files.path(NEW)).name
    mine = f"-{os.getpid()}-"
    assert mine in name
    alive, dead = files.folder / name, files.folder / name.replace(mine, "-999999999-")
    for part in (alive, dead):
        part.write_bytes(b"half")
    assert restarted(files).look() == FolderContents((), ())
    assert list(files.folder.iterdir()) == [alive]


# ---------------------------------------------------------------------- damaged


def test_a_flipped_byte_anywhere_is_found_and_named(files: ShardFiles) -> None:
    old, new = (files.save(version, state(0), COUNTERS) for version in (OLD, NEW))
    path = files.path(NEW)
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    for at in [*range(0, start, 7), *range(start, len(data), 101), len(data) - 1]:
        if data[at : at + 1] == b" ":
            continue  # between words of the header, or behind it: nothing depends on it
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        again = _or_refused(files)
        if again is None:
            assert at < start  # the job's name, or the format
            continue
        found = again.look()
        assert found.whole == (ShardFile(OLD, old),), at
        ((name, reason),) = found.strange
        assert name == path.name
        assert "damaged" in reason
        with pytest.raises(StateError, match="damaged"):
            again.load(NEW, new)
        assert path.exists()
    path.write_bytes(data)
    assert len(files.look().whole) == 2


def _or_refused(files: ShardFiles) -> ShardFiles | None:
    try:
        return restarted(files)
    except ConfigurationError:
        return None


def test_a_cut_or_longer_file_is_found_and_named(files: ShardFiles) -> None:
    digest = files.save(NEW, state(0), COUNTERS)
    path = files.path(NEW)
    data = path.read_bytes()
    for wrong in (*(data[:n] for n in (0, 3, 8, 100, len(data) // 2, len(data) - 1)), data + b"\0"):
        path.write_bytes(wrong)
        again = restarted(files)
        assert again.look().whole == ()
        assert [name for name, _ in again.look().strange] == [path.name]
        with pytest.raises(StateError, match="damaged"):
            again.load(NEW, digest)


def test_a_file_that_is_gone_or_not_the_one_that_was_marked_is_no_version(files: ShardFiles) -> None:
    files.save(NEW, state(0), COUNTERS)
    with pytest.raises(StateError, match=r"its digest is .* expected"):
        files.load(NEW, state(1).digest)
    with pytest.raises(StateError, match="No such file"):
        files.load(OLD, state(0).digest)


def test_a_file_under_another_versions_name_is_no_version(files: ShardFiles) -> None:
    files.save(NEW, state(0), COUNTERS)
    shutil.copy(files.path(NEW), files.path(OLD))
    assert list(files.look().whole) == [ShardFile(NEW, state(0).digest)]
    assert [name for name, _ in files.look().strange] == [files.path(OLD).name]


def test_foreign_files_are_named_and_left_alone(files: ShardFiles) -> None:
    (files.folder / "notes.txt").write_text("mine")
    (files.folder / "folder").mkdir()
    (files.folder / files.path(OLD).name).mkdir()
    again = restarted(files)
    assert [name for name, _ in again.look().strange] == [files.path(OLD).name, "folder", "notes.txt"]
    assert (files.folder / "notes.txt").read_text() == "mine"


@settings(max_examples=60)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_are_worse_than_damaged(tmp_path_factory: pytest.TempPathFactory, data: bytes, framed: bool) -> None:
    files = ShardFiles(tmp_path_factory.mktemp("disk"), "job")
    files.path(NEW).write_bytes(struct.pack("<Q", len(data)) + data if framed else data)
    assert [name for name, _ in restarted(files).look().strange] == [files.path(NEW).name]


words = st.dictionaries(
    st.sampled_from(["version", "hash", "digest", "block", "sizes", "blocks", "counters"]),
    st.text(max_size=20)
    | st.sampled_from(["[1e300]", "[true]", "[0, 9]", "{}", "[[]]", '{"pending": 1.5}', "-1", "1" * 5000]),
)


@settings(max_examples=100)
@given(words)
def test_no_words_of_a_header_are_worse_than_damaged(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, str]
) -> None:
    files = ShardFiles(tmp_path_factory.mktemp("disk"), "job")
    data = ShardHead("job", NEW, SHARD, COUNTERS, state(0).digest).encode()
    document = json.loads(data[8:])
    document["__metadata__"] |= changed
    text = json.dumps(document).encode()
    body = b"".join(bits(state(0)))
    files.path(NEW).write_bytes(struct.pack("<Q", len(text)) + text + body)
    found = files.look()
    assert len(found.whole) + len(found.strange) == 1
    if document == json.loads(data[8:]):
        assert found.whole


# ---------------------------------------------------------------------- refused


def test_another_jobs_folder_is_refused_by_name(files: ShardFiles) -> None:
    files.save(NEW, state(0), COUNTERS)
    other = ShardFiles(files.folder.parent, "other")
    assert other.folder != files.folder
    shutil.copy(files.path(NEW), other.folder)
    with pytest.raises(ConfigurationError, match="is of job 'job', this follower is of job 'other'"):
        ShardFiles(files.folder.parent, "other")


def test_an_older_format_is_refused_by_name(files: ShardFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "FORMAT", 0)
        files.save(NEW, state(0), COUNTERS)
    gone = part_of(files.path(NEW)).name.replace(f"-{os.getpid()}-", "-4194999-")
    (files.folder / gone).write_text("a part whose writer is dead")
    before = {path.name: path.read_bytes() for path in files.folder.iterdir()}
    with pytest.raises(ConfigurationError, match="has format 0, this package reads and writes format 1: use the pack"):
        restarted(files)
    assert {path.name: path.read_bytes() for path in files.folder.iterdir()} == before
    files.path(NEW).unlink()
    restarted(files)
    assert list(files.folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*Not a directory"):
        ShardFiles(tmp_path / "file", "job")


@pytest.mark.parametrize("job", ["a/b", "..", "", "käse"])
def test_any_jobs_name_makes_a_folder_beneath_the_followers(tmp_path: Path, job: str) -> None:
    files = ShardFiles(tmp_path, job)
    assert files.folder.parent == tmp_path
    files.save(NEW, state(0), COUNTERS)
    assert len(restarted(files).look().whole) == 1
