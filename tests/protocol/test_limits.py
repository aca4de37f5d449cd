"""Tests that texts, lists and numbers from peers are refused beyond the table of limits when messages are decoded."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import replace
from typing import Any

import pytest

from chaos_lightning.errors import WireError
from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, OUTER, TO_FOLLOWER, body_bytes
from chaos_lightning.outer.rules import messages as outer_messages
from chaos_lightning.outer.rules import types as outer_types
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement
from chaos_lightning.protocol import codec, limits
from chaos_lightning.protocol.limits import (
    ID_NBYTES,
    NAME_NBYTES,
    PLACE_NBYTES,
    PROCESS_NBYTES,
    TEXT_NBYTES,
    bounded,
    nbytes,
)
from chaos_lightning.protocol.types import (
    MAX_MEMBERS,
    MAX_PARTS,
    NO_VIEW,
    Contribution,
    Differs,
    DriftedPart,
    Heartbeat,
    Hello,
    Kind,
    LayersCovered,
    Leave,
    LinkEvent,
    LinkReport,
    View,
    ViewId,
)

HELLO = Hello("job", "a", "host", "127.0.0.1", 1, 2, 3, 1, 1, "1.0", (("lr", "0.1"),))
CONTRIBUTION = Contribution("a~1", ViewId(1, 1), 1, Kind.STEP, 0, "00")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (replace(HELLO, name="n" * 70_000), r"Hello\.name has 70000 bytes; expected 64 at most"),
        (replace(HELLO, name="\u20ac" * 22), r"Hello\.name has 66 bytes; expected 64 at most"),
        (replace(HELLO, job="j" * 65), r"Hello\.job has 65 bytes"),
        (replace(HELLO, node="n" * 65), r"Hello\.node has 65 bytes"),
        (LinkReport("b~2", -1.0, 1e9, ""), r"LinkReport\.latency_s is -1\.0; expected 0\.0 to"),
        (replace(HELLO, host="h" * 256), r"Hello\.host has 256 bytes; expected 255 at most"),
        (replace(HELLO, address="h" * 256), r"Hello\.address has 256 bytes"),
        (replace(HELLO, resume="r" * 129), r"Hello\.resume has 129 bytes; expected 128 at most"),
        (replace(HELLO, chain="c" * 129), r"Hello\.chain has 129 bytes"),
        (replace(HELLO, neighbours=("a", "b" * 65)), r"Hello\.neighbours has 65 bytes"),
        (replace(HELLO, neighbours=("a",) * (MAX_MEMBERS + 1)), r"Hello\.neighbours has 65537 items"),
        (replace(HELLO, fingerprint=(("n" * 20_000, ""),)), r"NamedText\.name has 20000 bytes"),
        (replace(HELLO, fingerprint=(("n", "v" * (TEXT_NBYTES + 1)),)), r"NamedText\.value has 1048577 bytes"),
        (replace(HELLO, port=65_536), r"Hello\.port is 65536; expected 0 to 65535"),
        (replace(HELLO, quota=-1), r"Hello\.quota is -1"),
        (replace(HELLO, workers=1 << 40), r"Hello\.workers is 1099511627776"),
        (replace(HELLO, term=(1 << 63) - 1), r"Hello\.term is 9223372036854775807"),
        (replace(HELLO, view=ViewId(1, -1)), r"ViewId\.number is -1"),
        (Heartbeat(ViewId(), 1 << 62, 0), r"Heartbeat\.seq is"),
        (Heartbeat(ViewId(), 1, 0, speed=1e9), r"Heartbeat\.speed is 1000000000\.0; expected 0\.0 to 1000\.0"),
        (Heartbeat(ViewId(), 1, 0, speed=-1.0), r"Heartbeat\.speed is -1\.0"),
        (Heartbeat(ViewId(), 1, 0, speed=math.nan), r"Heartbeat\.speed is nan"),
        (Heartbeat(ViewId(), 1, 0, step_time_s=-1.0), r"Heartbeat\.step_time_s is -1\.0; expected 0\.0 to 1000000\.0"),
        (Heartbeat(ViewId(), 1, 0, step_time_s=1e300), r"Heartbeat\.step_time_s is 1e\+300"),
        (Heartbeat(ViewId(), 1, 0, between_s=1e300), r"Heartbeat\.between_s is 1e\+300"),
        (LinkEvent("p" * 200, True, ""), r"LinkEvent\.peer has 200 bytes"),
        (Leave("r" * 20_000), r"Leave\.reason has 20000 bytes; expected 16384 at most"),
        (Differs("a~1", "\u00e9" * 10_000), r"Differs\.reason has 20000 bytes"),
        (replace(CONTRIBUTION, member="m" * 129), r"Contribution\.member has 129 bytes"),
        (replace(CONTRIBUTION, hyper="h" * (TEXT_NBYTES + 1)), r"Contribution\.hyper has 1048577 bytes"),
        (LayersCovered(MAX_PARTS + 1, 0, ()), r"LayersCovered\.first is \d+; expected 0 to"),
        (LayersCovered(0, MAX_PARTS + 1, ()), r"LayersCovered\.end is \d+; expected 0 to"),
        (DriftedPart("a~1", MAX_PARTS), r"DriftedPart\.part is \d+; expected 0 to"),
    ],
)
def test_what_is_beyond_its_limit_is_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        codec.decode(type(message), codec.encode(message))


def test_what_is_at_its_limit_is_read() -> None:
    hello = replace(
        HELLO, name="n" * NAME_NBYTES, host="h" * PLACE_NBYTES, resume="r" * ID_NBYTES, port=65_535, term=1 << 53
    )
    assert codec.decode(Hello, codec.encode(hello)) == hello


def test_a_leader_of_outer_sync_has_the_same_limits() -> None:
    hello = outer_messages.ClusterHello("c" * 101, "", "", 0, None, NO_VERSION, NO_VERSION, Agreement(()))
    with pytest.raises(WireError, match=r"ClusterHello\.cluster has 101 bytes; expected 100 at most"):
        FROM_CLUSTER.decode(FROM_CLUSTER.encode(hello))


def test_numbers_of_layers_are_limited_and_numbers_of_pushes_are_not() -> None:
    """Fields that number layers are limited; a field `first` of outer sync is not, since it numbers pushes."""
    joined = outer_types.Joined(outer_types.IncarnationId("c", 1), "host", 1 << 40)
    assert OUTER.decode(outer_types.Joined, body_bytes(joined)) == joined


def test_pipelines_that_can_be_written_can_be_read() -> None:
    view = View(ViewId(1, 1), NO_VIEW, (), pipelines="p" * (TEXT_NBYTES + 1))
    assert codec.decode(View, codec.encode(view)) == view


def test_what_is_made_of_a_clusters_name_fits_into_its_own_limit() -> None:
    """Texts derived from the longest cluster name can be decoded, since a chain with one that cannot be read would end
    the job.
    """
    name, place = "c" * PROCESS_NBYTES, "p" * PLACE_NBYTES
    opened = outer_types.JobOpened(Agreement(()), f"{name} at {place}", "n")
    assert OUTER.decode(outer_types.JobOpened, body_bytes(opened)) == opened
    joined = outer_types.Joined(outer_types.IncarnationId(name, 1 << 53), f"{name} (pid {1 << 22})", 1)
    assert OUTER.decode(outer_types.Joined, body_bytes(joined)) == joined
    key = outer_messages.LineKey(1, str(joined.incarnation), "name", b"key")
    assert TO_FOLLOWER.decode(TO_FOLLOWER.encode(key)) == key


def test_each_limit_is_of_a_field_that_there_is() -> None:
    """Each limit names an existing field, so that renaming a field does not silently remove its limit."""
    fields = {"NamedText.name", "NamedText.value"}
    for cls in codec.JOB.classes | OUTER.classes:
        hints = typing.get_type_hints(cls)
        fields |= {name for f in dataclasses.fields(cls) for name in (f.name, f"{cls.__name__}.{f.name}") if hints}
    assert not {*limits.TEXTS, *limits.LISTS, *limits.NUMBERS} - fields


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u20ac", "\U0001f600"])
def test_a_reason_is_cut_off_in_bytes_and_stays_a_text(letter: str) -> None:
    cut = bounded(letter * 100_000)
    assert nbytes(cut) < 4200
    assert cut.startswith(letter * 1000)
    assert cut.endswith("... (cut off)")
    assert bounded(cut[:1000]) == cut[:1000]
