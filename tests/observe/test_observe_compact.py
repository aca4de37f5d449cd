"""Short forms of log lines mean the same as the long ones; missing parts of a log are reported; logs are split into
files of limited size.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events.compact import MOST_WHOLE, WHOLE_EVERY, Before, _edited, _edits
from chaos_lightning.events.events import PARTS_A_DAY, EventLog, Record, Tail, log_files, read_events
from chaos_lightning.member.events import committed_fields
from chaos_lightning.protocol.types import GENESIS, Header, Kind, Ledger, Spent, ViewId, equal_shares

SEEDS = range(8)


def slots(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns random fields of `committed` events of a member, with all kinds of changes from one event to the next."""
    random_, before, found = random.Random(seed), GENESIS, []
    ledger: dict[tuple[str, int], list[tuple[int, int]]] = {("", 0): [(0, 4)]}
    members = ("a~1", "b~2", "c~3")
    for _ in range(count):
        kind = random_.choice([Kind.STEP] * 8 + [Kind.GATHER, Kind.BOUNDARY])
        if random_.random() < 0.05:
            members = tuple(random_.sample(("a~1", "b~2", "c~3", "d~4"), random_.randint(1, 4)))
        stream, spans = random_.choice(list(ledger.items()))
        used = ((spans[-1][1], spans[-1][1] + 4),)
        spans[-1] = (spans[-1][0], used[0][1]) if random_.random() < 0.8 else spans[-1]
        if random_.random() < 0.05:
            spans.append((spans[-1][1] + 8, spans[-1][1] + 12))
        if random_.random() < 0.02:
            ledger["other", random_.randint(0, 9)] = [(0, 1)]
        before = Header(
            seq=before.seq + 1,
            kind=kind,
            step=before.step + (kind == Kind.STEP),
            view=before.next_view,
            prev_hash=before.hash,
            next_view=ViewId(1, before.next_view.number + (random_.random() < 0.05)),
            shares=equal_shares((random_.choice([4.0, 4.0, 3.5]), 1.0) for _ in members),
            ledger=Ledger(tuple(Spent(s, e, tuple(x)) for (s, e), x in ledger.items())),
            name="outer sync" if kind == Kind.GATHER else "",
            error="it failed" if random_.random() < 0.02 else "",
        )
        spent = [Spent(*stream, used)] if random_.random() < 0.9 else []
        found.append(committed_fields(before, members, duration_s=random_.random(), wait_s=0.0, spent=spent))
    return found


def plain(fields: dict[str, Any]) -> Any:
    """Returns the fields as they are after encoding to JSON and decoding."""
    with_spans = {k: [vars_of(x) for x in v] if k in ("spent", "ledger") else v for k, v in fields.items()}
    return json.loads(json.dumps(with_spans))


def vars_of(spent: Spent) -> dict[str, Any]:
    return {"stream": spent.stream, "epoch": spent.epoch, "spans": spent.spans}


def commits(records: list[Record]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.fields.items() if k != "node"} for r in records if r.name == "committed"]


@pytest.mark.parametrize("seed", SEEDS)
def test_readers_get_what_was_emitted(tmp_path: Path, seed: int) -> None:
    told, tail, random_ = slots(seed, 400), Tail(tmp_path), random.Random(seed)
    live: list[Record] = []
    with EventLog.in_directory(tmp_path, "a") as log:
        for number, fields in enumerate(told):
            if number % 90 == 0:
                log.identify(f"a~{number}")
            log.emit("committed", **fields)
            if random_.random() < 0.1:
                log.emit("links", links=[{"peer": "b~2", "sent_bps": number}], relayed=0, waiting=0)
            if random_.random() < 0.1:
                live += tail.poll()
    records = list(read_events(tmp_path))
    live += tail.poll()
    assert commits(records) == [plain(fields) for fields in told]
    assert live == records
    assert {r.member for r in records if r.name == "committed"} == {f"a~{n}" for n in range(0, 400, 90)}
    assert {(r.node, r.own) for r in records if r.name == "committed"} == {("a", True)}
    (path,) = log_files(tmp_path)
    short = [line for line in path.read_text().splitlines() if '"header"' in line and '"member"' not in line]
    assert len(short) > 350


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text("ab.-", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.-n0", max_size=2), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["a", "b", "c.d", "-", "0"])
LINES = st.tuples(st.floats(0, 2e9).map(lambda t: round(t, 6)), st.dictionaries(KEYS, JSONS))


@given(LINES, LINES, st.booleans())
def test_any_line_follows_any_other(one: Any, other: Any, same_clocks: bool) -> None:
    before, line = ({"t": t, "mono": 5.0, "member": "a~1", "name": "links", **fields} for t, fields in (one, other))
    if not same_clocks:
        line["mono"] = 7.0
    before, line = json.loads(json.dumps(before)), json.loads(json.dumps(line))
    writer, reader = Before(), Before()
    for side in (writer, reader):
        side.keep(before, whole=True)
    short = writer.shorten(line)
    if short is not None:
        # Types, too: 1, 1.0 and true are equal to Python.
        assert json.dumps(reader.restore(short), sort_keys=True) == json.dumps(line, sort_keys=True)
        assert "member" not in short


@given(JSONS, JSONS)
def test_a_damaged_short_line_is_lost_and_no_more(path: Any, value: Any) -> None:
    before = Before()
    before.keep({"t": 1.0, "mono": 1.0, "member": "", "name": "links", "links": [[1]], "x": {"y": 1}}, whole=True)
    short = {"t": 2.0, "name": "links", str(path): value, "links.0.7": 1, "-": value}
    with pytest.raises((LookupError, TypeError, ValueError)):
        before.restore(short)


def test_an_odd_line_under_a_frequent_name_is_written_whole(tmp_path: Path) -> None:
    with EventLog(tmp_path / "x.jsonl", member="a~1") as log:
        for step in (1, "odd", 3, float("nan")):
            log.emit("committed", step=step, kind="step")
    assert [r["step"] for r in read_events(tmp_path) if r.name == "committed"] == [1, "odd", 3, "nan"]


# ------------------------------------------------------------------------------------------------ what is missing


def written(folder: Path, count: int = 250) -> Path:
    with EventLog.in_directory(folder, "a", role="member") as log:
        log.identify("a~1")
        for fields in slots(0, count):
            log.emit("committed", **fields)
    return log_files(folder)[0]


@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 30), (5, 6), (40, 80), (100, 103), (0, 140)])
def test_lines_that_are_missing_are_told_and_the_others_are_right(tmp_path: Path, first: int, last: int) -> None:
    path = written(tmp_path)
    whole = list(read_events(tmp_path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:first] + lines[last:]))
    part = list(read_events(tmp_path))
    lost = [r for r in part if r.name == "lost"]
    assert lost[0]["count"] == last - first
    assert all(r["gone"] for r in lost)
    kept = [(r.t, r.name, r.fields) for r in part if r.name != "lost"]
    at = kept.index((whole[-1].t, whole[-1].name, whole[-1].fields))
    assert at == len(kept) - 1
    assert all((r.t, r.name, r.fields) in kept for r in whole[:first])
    assert all(one in [(r.t, r.name, r.fields) for r in whole] for one in kept), "nothing is made up"
    assert sum(r["count"] for r in lost) + len(kept) == len(whole), "and each line is accounted for"
    assert len(lost) <= WHOLE_EVERY + 1


def test_a_file_that_an_older_version_wrote_is_read_beside_a_new_one(tmp_path: Path) -> None:
    path = written(tmp_path, 5)
    old = {"t": 1.0, "mono": 1.0, "member": "b~2", "node": "b", "name": "committed", "seq": 3}
    opened = {"t": 0.5, "mono": 0.5, "member": "", "name": "opened", "role": "member", "format": 1}
    (tmp_path / "member-b-1.jsonl").write_text(json.dumps(opened) + "\n" + json.dumps(old) + "\n")
    records = list(read_events(tmp_path))
    assert [r.name for r in records if r.source == "member-b-1.jsonl"] == ["opened", "committed"]
    assert not [r for r in records if r.name == "lost"]
    path.write_text(path.read_text().replace('"format":3', '"format":4'))
    with pytest.raises(ConfigurationError, match="in format 4, and this version of chaos-lightning reads 1 and 2 and"):
        list(read_events(tmp_path))


def test_a_signal_handlers_line_within_another_one_does_no_harm(tmp_path: Path) -> None:
    told = slots(1, 30)
    with EventLog(tmp_path / "x.jsonl", member="a~1") as log:
        real = log._put

        def interrupted(data: bytes) -> bool:
            log._put = real  # type: ignore[method-assign]
            log.emit("committed", **told[20])  # within the lock, as a handler would
            return real(data)

        for number, fields in enumerate(told[:20]):
            if number == 10:
                log._put = interrupted  # type: ignore[method-assign]
            log.emit("committed", **fields)
    assert commits(list(read_events(tmp_path))) == [plain(f) for f in [*told[:10], told[20], *told[10:20]]]


def test_a_handler_that_raises_within_a_line_costs_that_line(tmp_path: Path) -> None:
    told = slots(2, 30)
    with EventLog(tmp_path / "x.jsonl", member="a~1") as log:
        real = log._put

        def interrupted(data: bytes) -> bool:
            log._put = real  # type: ignore[method-assign]
            raise KeyboardInterrupt

        for number, fields in enumerate(told):
            if number == 10:
                log._put = interrupted  # type: ignore[method-assign]
                with pytest.raises(KeyboardInterrupt):
                    log.emit("committed", **fields)
            else:
                log.emit("committed", **fields)
    assert commits(list(read_events(tmp_path))) == [plain(f) for f in [*told[:10], *told[11:]]]


# ------------------------------------------------------------------------------------------------ files


def test_a_log_goes_on_in_further_files_that_are_read_as_one(tmp_path: Path) -> None:
    tail, live, told = Tail(tmp_path), [], slots(3, 300)
    with EventLog.in_directory(tmp_path, "a", day_nbytes=PARTS_A_DAY * 20_000) as log:
        log.identify("a~1")
        for fields in told:
            log.emit("committed", **fields)
            live += tail.poll()
    live += tail.poll()
    stem = f"member-a-{os.getpid()}"
    files = [p.name for p in log_files(tmp_path)]
    assert files == [f"{stem}.jsonl", *(f"{stem}.{n}.jsonl" for n in range(1, len(files)))]
    assert len(files) > 2
    records = list(read_events(tmp_path))
    assert commits(records) == [plain(f) for f in told]
    assert live == records
    assert {r.source for r in records} == {f"{stem}.jsonl"}
    assert [r.name for r in records if r.name != "committed"] == ["opened", "closed"]
    with EventLog.in_directory(tmp_path, "a") as again:  # of a process that has got the same process id
        assert again.path == tmp_path / f"{stem}.{len(files)}.jsonl"
    assert [r.name for r in read_events(tmp_path)][-3:] == ["closed", "opened", "closed"]


def test_what_is_of_the_past_is_not_missed(tmp_path: Path) -> None:
    with EventLog.in_directory(tmp_path, "a", day_nbytes=PARTS_A_DAY * 20_000) as log:
        log.identify("a~1")
        for fields in slots(3, 300):
            log.emit("committed", **fields)
    os.utime(log_files(tmp_path)[0], times=(time.time() - 1000,) * 2)
    everything, live = list(read_events(tmp_path)), Tail(tmp_path, time.time() - 600).poll()
    assert [r.name for r in live] == ["opened", *["committed"] * (len(live) - 2), "closed"]
    assert 2 < len(live) < len(everything)
    assert commits(live) == commits(everything)[2 - len(live) :]


def test_the_days_limit_holds_and_what_is_deleted_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = 200_000
    yesterday, others = tmp_path / "member-a-1.jsonl", tmp_path / "member-ab-1.jsonl"
    for path in (yesterday, others):
        path.write_bytes(b"\n" * limit)
    os.utime(yesterday, times=(time.time() - 90_000,) * 2)
    (tmp_path / "member-a-2.jsonl").write_bytes(b"\n" * 50_000)  # of an earlier process of this member
    os.utime(tmp_path / "member-a-2.jsonl", times=(time.time() - 100,) * 2)
    with caplog.at_level(logging.WARNING), EventLog.in_directory(tmp_path, "a", day_nbytes=limit) as log:
        log.identify("a~1")
        for _ in range(8):
            for fields in slots(4, 400):
                log.emit("committed", **fields)
            today = [p for p in log_files(tmp_path) if p.name.startswith("member-a-") and p != yesterday]
            assert sum(p.stat().st_size for p in today) <= limit
    assert len(caplog.records) == 1
    assert "log_day_nbytes" in caplog.text
    assert yesterday.exists()
    assert others.exists()
    assert not (tmp_path / "member-a-2.jsonl").exists()
    yesterday.unlink()
    others.unlink()
    records = list(read_events(tmp_path))
    assert [r.name for r in records[:2]] == ["lost", "opened"]
    files = log_files(tmp_path)
    last = json.loads(files[-1].read_text().splitlines()[-1])["n"]
    assert records[0]["count"] + len(records) - 1 + len(files) - 1 == last, "each line is shown, told of, or `opened`"


def test_a_folder_that_vanishes_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos_lightning.events.events.LOOK_EVERY_S", 0.0)
    folder, told = tmp_path / "logs", slots(5, 20)
    tail = Tail(folder)
    with EventLog.in_directory(folder, "a") as log, caplog.at_level(logging.WARNING):
        for fields in told[:10]:
            log.emit("committed", **fields)
        assert len(tail.poll()) == 11
        shutil.rmtree(folder)
        for fields in told[10:]:
            log.emit("committed", **fields)
        assert "deleted while it was written" in caplog.text
        live = tail.poll()
    records = list(read_events(folder))
    assert [r.name for r in records[:2]] == ["lost", "opened"]
    assert records[0]["count"] == 11
    assert commits(records) == [plain(f) for f in told[10:]]
    assert [r.name for r in live] == ["committed"] * 10, "who has seen the first ones misses nothing"
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_made_again_costs_the_evidence_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chaos_lightning.events.events.LOOK_EVERY_S", 0.0)
    with EventLog.in_directory(tmp_path / "logs", "a") as log, caplog.at_level(logging.WARNING):
        shutil.rmtree(tmp_path / "logs")
        (tmp_path / "logs").write_text("somebody else's")
        for fields in slots(6, 5):
            log.emit("committed", **fields)
    assert len(caplog.records) == 2, "each sort of trouble once"


ITEMS = st.lists(st.integers(0, 5), max_size=40)


@given(ITEMS, ITEMS)
def test_edits_lead_from_one_list_to_the_other(old: list[int], new: list[int]) -> None:
    edits = _edits(old, new)
    assert edits is None or _edited(old, json.loads(json.dumps(edits))) == new


def views(count: int, changes: int) -> list[dict[str, Any]]:
    """Returns random fields of a member's `view` events: from one to the next, one or two members leave and one may
    join.
    """
    chance = random.Random(count)
    ids, found = [f"n{i:04}~{i}" for i in range(count)], []
    for number in range(changes):
        links = [[a, b] for i, a in enumerate(ids) for b in ids[i + 1 : i + 5]]
        trees = [[1.0, list(ids), ["", *(ids[max(0, i - 3)] for i in range(1, len(ids)))]] for _ in range(2)]
        found.append(
            {"id": f"1.{number}", "members": list(ids), "joiners": [], "reason": "died", "links": links, "trees": trees}
        )
        for _ in range(chance.randint(1, 2)):
            del ids[chance.randrange(len(ids))]
        if chance.random() < 0.5:
            ids.append(f"j{number:04}~{1000 + number}")
    return found


@pytest.mark.parametrize("count", [8, 200])
def test_a_large_jobs_log_tells_what_a_view_changes_and_is_read_as_ever(tmp_path: Path, count: int) -> None:
    written = views(count, 5)
    with EventLog(tmp_path / "a.jsonl") as log:
        for fields in written:
            log.emit("view", **fields)
    read = [dict(r.fields) for r in read_events(tmp_path) if r.name == "view"]
    assert [{key: fields[key] for key in written[0]} for fields in read] == written
    (path,) = log_files(tmp_path)
    lines = [line for line in path.read_text().splitlines() if '"1.' in line]
    assert len(lines) == 5
    if count > MOST_WHOLE:
        assert max(map(len, lines[1:])) < len(lines[0]) / 8
    else:
        assert all('"members":[' in line for line in lines)


def test_an_edit_of_another_list_is_damage() -> None:
    for edits in ([[3, 9, []]], [[2, 1, []]], [[1, 2, []], [0, 1, []]]):
        with pytest.raises(ValueError, match="an edit of items"):
            _edited([1, 2, 3], edits)
