"""The event log keeps all emitted events, even if its process is killed or its disk is full."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events import reader
from chaos_lightning.events.events import EventLog, Tail, read_events
from chaos_lightning.events.reader import Logs, parse_line
from chaos_lightning.events.registry import problems
from chaos_lightning.member.events import committed_fields
from chaos_lightning.protocol.types import Header, Kind, Ledger, Spent, ViewId, equal_shares

HEADER = Header(
    seq=3,
    kind=Kind.STEP,
    step=2,
    view=ViewId(1, 2),
    prev_hash="0" * 16,
    next_view=ViewId(1, 2),
    shares=equal_shares([(4.0, 1.0), (2.0, 1.0)]),
    ledger=Ledger((Spent("", 0, ((0, 6),)),)),
)


def test_round_trip_keeps_order_and_stamps(tmp_path: Path) -> None:
    with EventLog.in_directory(tmp_path, "edge-1") as log:
        log.identify("edge-1~1")
        log.emit(
            "committed", **committed_fields(HEADER, ("a~1", "b~1"), duration_s=0.25, spent=[Spent("", 0, ((0, 4),))])
        )
        log.emit("death", member="edge-2~1", evidence="closed")
    records = list(read_events(tmp_path))
    assert [r.name for r in records] == ["opened", "committed", "death", "closed"]
    committed, death = records[1], records[2]
    assert (committed.member, committed.node, committed.by) == ("edge-1~1", "edge-1", "edge-1~1")
    assert committed["header"] == HEADER.hash
    assert committed["view"] == "1.2"
    assert committed["spent"] == [{"stream": "", "epoch": 0, "spans": [[0, 4]]}]
    assert committed["contributors"] == [["a~1", 4.0], ["b~1", 2.0]]
    assert (death.member, death.by, death.node) == ("edge-2~1", "edge-1~1", "edge-2")
    assert all(problems(r.name, r.fields) == [] for r in records)


def test_none_discards(tmp_path: Path) -> None:
    log = EventLog(None)
    log.emit("joined")
    log.close()
    assert EventLog.in_directory("", "x").path is None


def test_odd_values_cost_their_form_not_the_training(tmp_path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    with EventLog(tmp_path / "x.jsonl") as log:
        log.emit("odd", nan=float("nan"), raw=b"\x01", where=Path("/tmp"), set={2, 1}, name="n", t=1, fine=ViewId(1, 7))
        log.emit("odd", loop=loop)
        log.emit("odd", keys={(1, 2): object})
        log.emit("odd", text="\ud800 line\nbreak")
    records = [r for r in read_events(tmp_path) if r.name == "odd"]
    assert len(records) == 4
    assert records[0].fields["nan"] == "nan"
    assert records[0].fields["raw"] == "01"
    assert records[0].fields["set"] == [1, 2]
    assert records[0].fields["fine"] == "1.7"
    assert (records[0].fields["name_"], records[0].fields["t_"]) == ("n", 1)
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"not strict JSON: {word}"))


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    with EventLog(tmp_path / "x.jsonl") as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.emit("n", i=i, k=k, pad="p" * 500) for k in range(200)])  # type: ignore[misc]
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = [r for r in read_events(tmp_path) if r.name == "n"]
    assert sorted((r["i"], r["k"]) for r in records) == [(i, k) for i in range(4) for k in range(200)]


def test_sigkill_loses_nothing_that_was_emitted(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from chaos_lightning.events.events import EventLog\n"
        "log = EventLog(sys.argv[1])\n"
        "for i in range(300): log.emit('n', i=i)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.jsonl")], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == -signal.SIGKILL
    assert [r["i"] for r in read_events(tmp_path) if r.name == "n"] == list(range(300))


def test_emit_inside_a_signal_handler_does_not_deadlock(tmp_path: Path) -> None:
    with EventLog(tmp_path / "x.jsonl") as log:
        real = log._put

        def interrupted(data: bytes) -> bool:
            log._put = real  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGUSR1)  # the handler runs while the lock is held
            return real(data)

        before = signal.signal(signal.SIGUSR1, lambda *_: log.emit("from_handler"))
        try:
            log._put = interrupted  # type: ignore[method-assign]
            log.emit("outer")
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert {"from_handler", "outer"} <= {r.name for r in read_events(tmp_path)}


def test_full_disk_warns_once_counts_and_says_so_when_space_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.write
    room: list[int | None] = [None]  # bytes a write may take; None: all; 0: ENOSPC

    def write(fd: int, data: bytes) -> int:
        if room[0] is None:
            return real(fd, data)
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[: room[0]])

    log = EventLog(tmp_path / "x.jsonl")
    log.emit("before")
    monkeypatch.setattr("chaos_lightning.events.events.os.write", write)
    with caplog.at_level(logging.WARNING):
        room[0] = 10  # the disk takes the beginning of a line
        log.emit("torn")
        room[0] = 0
        log.emit("gone")
        log.emit("gone")
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    assert log.lost == 3
    room[0] = None
    log.emit("after")
    log.close()
    records = list(read_events(tmp_path))
    assert [r.name for r in records] == ["opened", "before", "lost", "after", "closed"]
    assert records[2]["count"] == 3
    assert log.lost == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_device_that_is_always_full(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log = EventLog("/dev/full")
        for _ in range(5):
            log.emit("x")
    assert log.lost == 6
    assert len(caplog.records) == 1
    log.close()


def test_unwritable_place_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        log = EventLog(tmp_path / "file" / "x.jsonl")
        log.emit("x")
    assert "training goes on" in caplog.text
    assert log.path is None


AS_NOBODY = """
import os, sys
from pathlib import Path
from chaos_lightning.events.events import EventLog, forget_old
folder = Path(sys.argv[1])
if not os.geteuid():
    os.seteuid(65534)
forget_old(folder, 0.0)
with EventLog.in_directory(folder, "a") as log:
    log.emit("x")
    print(log.path)
"""


def test_a_folder_of_somebody_else_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0)
    words = [sys.executable, "-c", AS_NOBODY, str(tmp_path / "theirs" / "logs")]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "None\n"), run.stderr
    (warning,) = run.stderr.splitlines()
    assert "Permission denied" in warning
    assert "training goes on" in warning


def test_reader_passes_over_torn_and_foreign_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"t":1,"mono":1,"member":"a","name":"one"}\n[1]\nnot json\n\n{"t":"x","name":"y"}\n{"t":2,"na')
    assert [r.name for r in read_events(tmp_path)] == ["one"]
    log = EventLog(path)  # a successor closes the torn line off
    log.emit("two")
    log.close()
    assert [r.name for r in read_events(path)] == ["one", "opened", "two", "closed"]


def test_reading_a_missing_directory_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no event log at .*nowhere"):
        list(read_events(tmp_path / "nowhere"))


def test_files_are_merged_by_time_and_each_keeps_its_order(tmp_path: Path) -> None:
    def line(t: float, name: str) -> str:
        return json.dumps({"t": t, "mono": t, "member": "", "name": name}) + "\n"

    # The first file's clock is set back between its second and third line.
    (tmp_path / "a.jsonl").write_text(line(1.0, "a1") + line(5.0, "a2") + line(2.0, "a3"))
    (tmp_path / "b.jsonl").write_text(line(0.5, "b1") + line(4.0, "b2") + line(6.0, "b3"))
    names = [r.name for r in read_events(tmp_path)]
    assert names == ["b1", "a1", "b2", "a2", "a3", "b3"]


def test_tail_returns_each_event_once_and_waits_for_half_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "later")
    assert tail.poll() == []
    log = EventLog(tmp_path / "later" / "x.jsonl")
    log.emit("one")
    assert [r.name for r in tail.poll()] == ["opened", "one"]
    assert tail.poll() == []
    path = tmp_path / "later" / "x.jsonl"
    with path.open("ab") as file:
        file.write(b'{"t":9e9,"mono":0,"member":"a","na')
        file.flush()
        assert tail.poll() == []
        file.write(b'me":"two"}\n')
    assert [(r.name, r.line) for r in tail.poll()] == [("two", 3)]
    log.close()


def test_parse_line_refuses_what_is_no_event() -> None:
    assert parse_line("") is None
    assert parse_line('{"name": 3}') is None
    record = parse_line('{"name":"x","t":1,"mono":2}')
    assert record is not None
    assert (record.member, record.by, record.node) == ("", "", "")


def test_a_planted_link_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"member-a-{os.getpid()}.jsonl").symlink_to(victim)
    with EventLog.in_directory(tmp_path / "logs", "a") as log:
        log.emit("joined")
    assert victim.read_text() == "precious"
    assert "a link or special file is there; remove it, or name another log_dir" in caplog.text


def test_a_planted_second_name_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"member-a-{os.getpid()}.jsonl").hardlink_to(victim)
    EventLog.in_directory(tmp_path, "a").close()
    assert victim.read_text() == "precious"
    assert "has 2 names" in caplog.text


@pytest.mark.parametrize("reader", [False, True])
def test_a_planted_pipe_holds_nobody_up(tmp_path: Path, reader: bool, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"member-a-{os.getpid()}.jsonl"
    os.mkfifo(path)
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader else -1
    EventLog.in_directory(tmp_path, "a").close()
    assert "a link or special file is there" in caplog.text
    with pytest.raises(ConfigurationError, match=r"\.jsonl cannot be read: no regular file"):
        list(read_events(tmp_path))
    assert Tail(tmp_path).poll() == []
    if reader:
        assert os.read(held, 1) == b""
        os.close(held)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"member-a-{os.getpid()}.jsonl"
    path.write_text("")
    os.chown(path, 12345, -1)
    EventLog.in_directory(tmp_path, "a").close()
    assert path.read_text() == ""
    assert "belongs to user 12345" in caplog.text


def test_logs_read_again_are_the_same_and_end_where_they_ended(tmp_path: Path) -> None:
    for node in "ab":
        with EventLog.in_directory(tmp_path, node) as log:
            for i in range(5):
                log.emit("n", i=i)
    logs = Logs(tmp_path)
    once = list(logs)
    with next(tmp_path.iterdir()).open("a") as file:
        file.write('{"t": 1, "name": "later"}\n')
    assert list(logs) == once
    assert [r.name for r in read_events(tmp_path)].count("later") == 1


def test_a_line_goes_over_blocks_and_no_file_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in "abc":
        with EventLog.in_directory(tmp_path, node) as log:
            for i in range(20):
                log.emit("n", i=i)
    (tmp_path / "member-d-1.jsonl").write_text('\n{"t": 1, "name": "first"}\n\n{"t": 2, "name": "without an end"}')
    whole = list(read_events(tmp_path))
    monkeypatch.setattr(reader, "BLOCK_NBYTES", 7)
    before = len(os.listdir("/proc/self/fd"))
    records = read_events(tmp_path)
    begun = [next(records) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert [*begun, *records] == whole
    assert [(r.name, r.line) for r in whole if r.source == "member-d-1.jsonl"] == [("first", 2), ("without an end", 4)]


def test_a_file_that_goes_while_it_is_read_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BLOCK_NBYTES", 32)
    text = "".join(json.dumps({"t": i, "name": "n", "i": i}) + "\n" for i in range(20))
    for name in ("gone", "made-anew"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text)
        records = read_events(path)
        assert next(records)["i"] == 0
        path.rename(tmp_path / "aside")
        if name == "made-anew":
            path.write_text(text)
        assert len(list(records)) < 19
