"""Tests the description of a state as byte ranges: hashes, layouts, encoded tables, and all kinds of tensor memory."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication import StateTable, build_table, decode_table, layout_hash, state_hash
from chaos_lightning.replication.memory import DeviceRegion, Region, region
from chaos_lightning.replication.table import PIECE_NBYTES, check_layout, hash_region

STATE = [("w", torch.arange(700_000.0)), ("b", torch.zeros(3, dtype=torch.bfloat16)), ("e", torch.zeros(0, 5))]


def test_pieces_cover_every_byte_once_and_never_cross_tensors() -> None:
    table = build_table(STATE, [("extra", torch.tensor(1.0))])
    assert [(e.name, e.offset, e.nbytes, len(e.hashes), e.attached) for e in table.entries] == [
        ("w", 0, 2_800_000, 3, False),
        ("b", 2_800_000, 6, 1, False),
        ("e", 2_800_006, 0, 0, False),
        ("extra", 2_800_006, 4, 1, True),
    ]
    at = 0
    for piece in table.pieces():
        assert table.entries[piece.entry].offset + piece.start == at
        assert 0 < piece.nbytes <= PIECE_NBYTES
        at += piece.nbytes
    assert at == table.nbytes == 2_800_010


def test_the_state_hash_sees_names_types_shapes_and_bytes() -> None:
    base = [("a", torch.arange(6.0)), ("b", torch.ones(2))]
    others = [
        [("a", torch.arange(6.0)), ("c", torch.ones(2))],
        [("a", torch.arange(6.0)), ("b", torch.ones(2).int())],
        [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2))],
        [("a", torch.arange(6.0)), ("b", torch.tensor([1.0, 1.0000001]))],
        [("b", torch.ones(2)), ("a", torch.arange(6.0))],
        [("a", torch.arange(6.0))],
        [],
    ]
    hashes = [state_hash(s) for s in [base, *others]]
    assert len(set(hashes)) == len(hashes)
    assert all(len(h) == 32 for h in hashes)
    assert state_hash([(n, t.clone()) for n, t in base]) == hashes[0]


def test_attached_tensors_are_no_part_of_the_state_hash() -> None:
    with_extra = build_table(STATE, [("extra", torch.tensor(1.0))])
    assert with_extra.state_hash == build_table(STATE).state_hash
    assert with_extra.attached_hash != build_table(STATE).attached_hash


def test_the_layout_hash_sees_names_types_shapes_and_groups_but_no_bytes() -> None:
    base = layout_hash([("a", torch.zeros(6))], [["a"]])
    assert base == layout_hash([("a", torch.ones(6))], [["a"]])
    others = [
        layout_hash([("b", torch.zeros(6))], [["a"]]),
        layout_hash([("a", torch.zeros(2, 3))], [["a"]]),
        layout_hash([("a", torch.zeros(6).double())], [["a"]]),
        layout_hash([("a", torch.zeros(6))], [["a"], []]),
        layout_hash([("a", torch.zeros(6))]),
    ]
    assert len({base, *others}) == 6
    assert len(base) == 16


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(StateError, match=r"two tensors .* 'w'"):
        build_table([("w", torch.zeros(1)), ("v", torch.zeros(1)), ("w", torch.zeros(1))])


def test_a_table_comes_back() -> None:
    table = build_table(STATE, [("extra", torch.tensor(1.0))])
    back = decode_table(table.encode())
    assert back == table
    assert (back.state_hash, back.attached_hash) == (table.state_hash, table.attached_hash)
    assert decode_table(StateTable(()).encode()) == StateTable(())


def damaged(**changes: Any) -> bytes:
    row = dict(zip("name dtype shape nbytes hashes attached device".split(), _row(), strict=True)) | changes  # noqa: SIM905
    return json.dumps({"piece": PIECE_NBYTES, "tensors": [list(row.values())]}).encode()


def _row() -> list[Any]:
    return ["w", "float32", [2, 3], 24, "00" * 16, 0, "cpu"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (damaged(name=3), "malformed row"),
        (damaged(dtype="nn"), "unknown type 'nn'"),
        (damaged(dtype=["float32"]), "unknown type"),
        (damaged(shape=[2, -3]), "impossible shape"),
        (damaged(shape=[2, 3.0]), "impossible shape"),
        (damaged(shape=7), "malformed"),
        (damaged(shape=[2, 4]), "cannot have 24 bytes"),
        (damaged(nbytes=25), "cannot have 25 bytes"),
        (damaged(nbytes="24"), "cannot have '24' bytes"),
        (damaged(hashes="00" * 15), "piece hashes"),
        (damaged(hashes="zz"), "malformed"),
        (damaged(attached=2), "malformed row"),
        (damaged(device="cuda:0;"), "malformed row"),
        (json.dumps({"piece": 1, "tensors": []}).encode(), "pieces of 1 bytes"),
        (json.dumps({"piece": PIECE_NBYTES, "tensors": [_row(), _row()]}).encode(), "twice"),
        (json.dumps({"piece": PIECE_NBYTES, "tensors": [[1]]}).encode(), "malformed row"),
        (json.dumps({"piece": PIECE_NBYTES, "tensors": {}}).encode(), "without a list"),
        (
            json.dumps(
                {"piece": PIECE_NBYTES, "tensors": [["a", *_row()[1:5], 1, "cpu"], ["b", *_row()[1:5], 0, "cpu"]]}
            ).encode(),
            "replicated tensor after an attached",
        ),
        (b"[]", "malformed"),
        (b"\xff", "malformed"),
        (b"[" * 9999, "malformed"),
    ],
)
def test_inconsistent_tables_are_refused(data: bytes, words: str) -> None:
    assert decode_table(damaged()).nbytes == 24
    with pytest.raises(WireError, match=words):
        decode_table(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=8)
)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"piece": st.just(PIECE_NBYTES), "tensors": JSON | st.lists(st.lists(JSON, min_size=7, max_size=7))}
    )
    | JSON
)
def test_random_tables_are_refused_or_read(document: object) -> None:
    with contextlib.suppress(WireError):
        decode_table(json.dumps(document).encode())


def test_layouts_that_agree() -> None:
    check_layout(build_table(STATE, [("extra", torch.zeros(1))]), [(n, torch.empty_like(t)) for n, t in STATE])


# --- memory ----------------------------------------------------------------------------------------------------------

KINDS = [
    torch.arange(10.0),
    torch.arange(10.0).view(2, 5).t(),
    torch.arange(20)[::2],
    torch.tensor(7, dtype=torch.int16),
    torch.zeros(0),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.tensor([True, False]),
]


@pytest.mark.parametrize("kind", [region, lambda name, tensor: DeviceRegion(tensor)])
@pytest.mark.parametrize("source", KINDS, ids=str)
def test_bytes_go_in_and_out(kind: Any, source: Tensor) -> None:
    """A tensor's bytes are read and written unchanged through each kind of region; the accelerator's kind is tried on
    host tensors.
    """
    target = torch.zeros_like(source)
    reader: Region = kind("x", source)
    writer: Region = kind("x", target)
    assert reader.nbytes == writer.nbytes == source.numel() * source.itemsize
    assert b"".join([reader.read(0, 1), reader.read(1, reader.nbytes)] if reader.nbytes else []) == (
        source.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    )
    for start in range(0, writer.nbytes, 3):
        stop = min(start + 3, writer.nbytes)
        landing = writer.land(start, stop)
        landing[:] = reader.read(start, stop)
        writer.landed(start, stop, landing)
    writer.finish()
    assert torch.equal(source, target)
    assert hash_region(reader) == hash_region(region("x", target))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, 2, device="meta"), "'x' cannot travel: it lies on the meta device"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (nn.LazyLinear(3).weight, "lazy module"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "layout torch.jagged"),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(StateError, match=words):
        state_hash([("x", tensor)])


def test_wrapper_tensors_are_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(StateError, match="TwoTensor"):
        state_hash([("x", TwoTensor(torch.zeros(2), torch.zeros(2)))])


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("source", KINDS, ids=str)
def test_accelerator_memory(source: Tensor) -> None:
    device = torch.accelerator.current_accelerator()
    there = source.to(device)
    assert state_hash([("x", there)]) == state_hash([("x", source)])
    target = torch.zeros_like(there)
    writer, reader = region("x", target), region("x", there)
    if writer.nbytes:
        landing = writer.land(0, writer.nbytes)
        landing[:] = reader.read(0, writer.nbytes)
        writer.landed(0, writer.nbytes, landing)
    writer.finish()
    assert torch.equal(target.cpu(), source)
