"""Tests border tensors (activations and gradients between stages) in frames: they are read back, and hostile bytes are
refused.
"""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.errors import WireError
from chaos_lightning.pipeline.tensors import ALIGNED_NBYTES, MAX_TENSORS, Border, BorderReader, write

KINDS = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def through(frames, limit_nbytes=1 << 30):
    reader = BorderReader(limit_nbytes)
    for frame in frames:
        assert not reader.complete
        data = b"".join(frame)
        reader.room(len(data))[:] = data
        reader.filled(len(data))
    assert reader.complete
    return reader.border()


def same(one, other):
    assert one.specs == other.specs
    assert len(one.tensors) == len(other.tensors)
    for a, b in zip(one.tensors, other.tensors, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def some_tensor(kind, shape):
    count = torch.Size(shape).numel()
    if kind == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    return torch.randint(0, 100, shape).to(kind)


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.one_of(st.none(), st.builds(some_tensor, st.sampled_from(KINDS), shapes))


@settings(max_examples=80, deadline=None)
@given(st.lists(tensors, max_size=5), st.text(max_size=200), st.sampled_from([64, 100, 1000, 1 << 20]))
def test_what_is_written_is_read(found, specs, most_nbytes):
    border = Border(tuple(found), specs)
    frames = write(border, most_nbytes)
    assert all(sum(p.nbytes for p in frame) <= most_nbytes for frame in frames[1:])
    same(through(frames), border)


def test_one_frame_holds_what_fits_and_is_not_copied():
    x = torch.randn(1000)
    (frame,) = write(Border((x,), "specs"))
    x[0] = 7.0
    assert struct.unpack("f", frame[1][:4])[0] == 7.0
    assert frame[0].nbytes % ALIGNED_NBYTES == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(6)[::2],
        torch.tensor(3.0),
        torch.empty(0, 3),
        torch.randn(3, requires_grad=True) * 2,
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_of_any_strides(tensor):
    got = through(write(Border((tensor,)))).tensors[0]
    assert torch.equal(got, tensor.detach().resolve_conj())
    assert got.is_contiguous()
    assert not got.requires_grad


def test_received_tensors_do_not_share_a_version():
    border = through(write(Border((torch.zeros(3), torch.zeros(3)))))
    border.tensors[0].add_(1)
    assert border.tensors[1]._version == 0
    assert torch.equal(border.tensors[1], torch.zeros(3))
    assert border.tensors[1].data_ptr() % ALIGNED_NBYTES == 0


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(WireError, match=r"tensor 1 of a border is of torch\.float32, torch\.sparse_coo"):
        write(Border((torch.zeros(2), torch.eye(2).to_sparse())))
    with pytest.raises(WireError, match=f"257 tensors; expected at most {MAX_TENSORS}"):
        write(Border((None,) * 257))


# ------------------------------------------------------------------------------------------------ hostile


def said(data, limit_nbytes=1 << 20):
    reader = BorderReader(limit_nbytes)
    reader.room(len(data))[:] = data
    reader.filled(len(data))
    return reader


def head(version=1, count=1, specs_nbytes=0, data_nbytes=64, rows=b"\x01\x01" + struct.pack("<Q", 4), rest=b""):
    data = struct.pack("<BxHIQ", version, count, specs_nbytes, data_nbytes) + rows + rest
    return data.ljust(-len(data) % 64 + len(data), b"\0")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "begins with 0 bytes"),
        (b"\1" * 15, "begins with 15 bytes"),
        (head(version=9), "format 9"),
        (head(count=300), "a border of 300 tensors"),
        (head(count=200, rows=b"\x01\x00" * 8), "tensor 2[0-9] of a border is not in its first frame"),
        (head(specs_nbytes=1 << 30), "1073741824 bytes of specs"),
        (head(specs_nbytes=100), "end behind its first frame"),
        (head(specs_nbytes=2, rest=b"\xff\xff"), "no text"),
        (head(data_nbytes=1 << 40), "1099511627776 bytes and"),
        (head(data_nbytes=128), "have 64 bytes by their shapes, and 128 by its head"),
        (head(rows=b"\x0d\x01" + struct.pack("<Q", 4)), "has type 13"),
        (head(rows=b"\x00\x01" + struct.pack("<Q", 4)), "has type 0 and 1 dimensions"),
        (head(rows=b"\x01\x11" + bytes(17 * 8)), "17 dimensions"),
        (head(rows=b"\x01\x02" + struct.pack("<QQ", 1 << 60, 1 << 60)), "expected at most 1048576 bytes"),
        (head(rows=b"\x01\x02" + struct.pack("<QQ", 1 << 19, 1 << 19)), "expected at most 1048576 bytes"),
        (head(rows=b"\x01\x02" + struct.pack("<QQ", 0, 1 << 60)), "expected at most 1048576 bytes"),
        (head() + bytes(1), "its head has 64, its tensors 64"),
    ],
)
def test_hostile_heads_are_refused_by_name(data, words):
    with pytest.raises(WireError, match=words):
        said(data)


def test_frames_that_follow_are_bounded():
    reader = said(head())
    assert not reader.complete
    with pytest.raises(WireError, match="goes on with 65 bytes, where 64 were to come"):
        reader.room(65)
    with pytest.raises(WireError, match="goes on with 0 bytes"):
        reader.room(0)
    for nbytes in (60, 4):
        reader.room(nbytes)[:] = bytes(nbytes)
        reader.filled(nbytes)
    assert reader.complete
    assert torch.equal(reader.border().tensors[0], torch.zeros(4))


def test_a_large_frame_is_refused_before_it_is_received():
    with pytest.raises(WireError, match="expected at most 1024"):
        BorderReader(1024).room(64 << 20)
