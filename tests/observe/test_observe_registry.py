"""Each package declares its own events in one place, and the events that the code writes match the declarations."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from observe_synthetic import Script, story

import chaos_lightning
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.events import registry
from chaos_lightning.events.events import EventLog, Tail, read_events
from chaos_lightning.events.registry import Event, known, problems
from chaos_lightning.observe.outer.report import write_reports
from chaos_lightning.observe.timeline import Timeline

ROOT = Path(__file__).resolve().parents[2]
WRITERS = ("emit", "note", "_note")
"""Methods that take an event's name and its fields."""


def written() -> Iterator[tuple[str, ast.Call, str]]:
    """Yields (place, call, name) for each call in the code that writes an event whose name is a literal."""
    for folder in ("chaos_lightning", "strategies", "callbacks", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) == 1):
                    continue
                if call.func.attr in WRITERS:
                    either = call.args[0]
                    for name in (either.body, either.orelse) if isinstance(either, ast.IfExp) else (either,):
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            yield f"{path.relative_to(ROOT)}:{call.lineno}", call, name.value


def test_whatever_is_written_is_declared_and_has_its_fields() -> None:
    found = list(written())
    assert len(found) > 100
    wrong = []
    for place, call, name in found:
        given: dict[str, object] = {k.arg: None for k in call.keywords if k.arg is not None}
        expanded = any(k.arg is None for k in call.keywords)
        wrong += [f"{place}: {text}" for text in problems(name, given) if name not in known() or not expanded]
    assert wrong == []


def test_whatever_is_declared_is_written() -> None:
    texts = [p.read_text() for folder in ("chaos_lightning", "strategies") for p in (ROOT / folder).rglob("*.py")]
    assert [name for name in known() if sum(text.count(f'"{name}"') for text in texts) < 2] == []


def test_the_made_up_run_of_these_tests_is_one_that_the_product_may_write(tmp_path: Path) -> None:
    records = read_events(story().write(tmp_path))
    assert [text for r in records for text in problems(r.name, r.fields)] == []


def test_each_event_says_what_it_means_and_each_field_once() -> None:
    assert [e.name for e in known().values() if not e.meaning or set(e.fields) & set(e.also)] == []


def test_a_wrong_event_is_told_in_words() -> None:
    assert problems("lunch", {}) == [
        "no room declares an event 'lunch'; it belongs into EVENTS of the events.py beside what writes it"
    ]
    assert problems("death", {"text": ""}) == ["event 'death' has no field 'evidence' (words)"]
    assert problems("death", {"evidence": "closed", "more": 1}) == []


# ------------------------------------------------------------------------------------------------ a new room


@pytest.fixture
def outer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a package that has an events.py, and whose own import raises an error."""
    room = tmp_path / "package" / "outer"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("raise AssertionError('to read logs no room is imported')")
    (room / "events.py").write_text(
        "from chaos_lightning.events.registry import Event\n"
        "EVENTS = (Event('outer_round', 'a round is over', {'round': 'number', 'seconds': 's'},"
        " note='round {round} took {seconds:.1f} s'),)"
    )
    monkeypatch.setattr(chaos_lightning, "__path__", [*chaos_lightning.__path__, str(room.parent)])
    known.cache_clear()
    yield room
    monkeypatch.undo()
    known.cache_clear()


@pytest.mark.usefixtures("unpictured", "outer")
def test_a_new_room_has_its_events_known_and_shown(tmp_path: Path) -> None:
    run = Script()
    run.found(["a", "b"])
    run.steps(2)
    run.say("b~1", "outer_round", round=3, seconds=1.25)
    run.say("a~1", "outer_round", round="odd", seconds="odd")
    logs = run.write(tmp_path / "logs")
    timeline = Timeline.of(read_events(logs))
    assert [n.text for n in timeline.notes if n.member == "b~1"] == ["round 3 took 1.2 s"]
    page = write_reports(logs)[0].page.read_text()
    assert "<td>b~1</td><td>outer_round</td><td>round 3 took 1.2 s</td>" in page
    assert "round=odd, seconds=odd" in page, "of a form that the text is not for"
    assert problems("outer_round", {"round": 3}) == ["event 'outer_round' has no field 'seconds' (s)"]


def test_a_name_belongs_to_one_room(outer: Path) -> None:
    text = (outer / "events.py").read_text()
    (outer / "events.py").write_text(text.replace("outer_round", "committed"))
    with pytest.raises(ValueError, match=r"'committed' is declared in .*member/events.py and in .*outer/events.py"):
        known()


def test_a_text_leaves_the_place_of_a_missing_field_empty() -> None:
    event = Event("x", "", note="fault injected: {kind} {phase}")
    assert event.words({"kind": "sigkill"}) == "fault injected: sigkill"


# ------------------------------------------------------------------------------------------------ versions


def test_a_log_in_another_format_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EventLog(tmp_path / "old.jsonl") as log:
        log.emit("notice", text="of old")
    (before,) = [r["format"] for r in read_events(tmp_path) if r.name == "opened"]
    assert before == registry.FORMAT
    monkeypatch.setattr(registry, "READABLE", {before + 1})
    with pytest.raises(ConfigurationError, match=rf"old.jsonl is in format {before}, .*; read it with the version"):
        list(read_events(tmp_path))
    monkeypatch.setattr("chaos_lightning.events.events.FORMAT", before + 1)
    tail = Tail(tmp_path)
    with EventLog(tmp_path / "new.jsonl") as log, caplog.at_level(logging.WARNING):
        assert [r.source for r in tail.poll()] == ["new.jsonl"]
        log.emit("notice", text="of now")
        assert [r.name for r in tail.poll()] == ["notice"]
    assert caplog.text.count("old.jsonl is in format") == 1


def test_a_log_from_before_there_was_a_format_is_of_the_first_one(tmp_path: Path) -> None:
    run = Script()
    run.found(["a"])  # its lines tell no format
    assert list(read_events(run.write(tmp_path)))
