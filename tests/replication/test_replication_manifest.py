"""Tests the typed codec: values survive encoding, unsupported values are named, and malformed bytes are refused."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication import decode_manifest, encode_manifest


def there_and_back(value: object) -> Any:
    encoded = encode_manifest(value)
    return decode_manifest(encoded.data, dict(encoded.tensors))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.just(datetime.UTC))
    | st.timedeltas()
    | st.uuids()
    | st.fractions()
    | st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3])])
)
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.just("$")
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.dictionaries(st.integers(), inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES)
def test_what_goes_in_comes_out(value: object) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert encode_manifest(back).data == encode_manifest(value).data


@pytest.mark.parametrize(
    "value",
    [
        frozenset({1, (2, "x")}),
        collections.Counter("hello"),
        collections.deque([1, 2], maxlen=5),
        collections.defaultdict(list, {"a": [1]}),
        collections.defaultdict(None, {"a": 1}),
        range(1, 9, 2),
        slice(None, 3),
        pathlib.Path("/some/where"),
        decimal.Decimal("0.1"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=7),
        datetime.date(2024, 2, 29),
        datetime.time(1, 2, 3),
        bytearray(b"abc"),
        pytest.param(10**5000, id="huge"),
        -0.0,
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2024-01-01"),
        "\ud800",
    ],
)
def test_particular_values(value: object) -> None:
    back = there_and_back({"v": value})["v"]
    assert back == value
    assert type(back) is type(value)


def test_special_floats() -> None:
    nan, inf, minus, zero = there_and_back([float("nan"), math.inf, -math.inf, -0.0])
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)
    assert math.copysign(1, zero) == -1


def test_default_factories_work_again() -> None:
    back = there_and_back(collections.defaultdict(list))
    back["new"].append(1)
    assert back == {"new": [1]}


@pytest.mark.parametrize("size", [0, 5, 40_000])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "bool", "i2", "u8", "c16", "U3", "S4", "M8[s]"])
def test_arrays(dtype: str, size: int) -> None:
    array = np.arange(size).astype("M8[s]" if dtype.startswith("M") else "i8").astype(dtype).reshape(-1, 1)
    back = there_and_back(array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)
    back[...] = array


def test_large_arrays_travel_as_tensors() -> None:
    encoded = encode_manifest({"a": np.arange(100_000.0), "b": np.arange(10)})
    assert [name for name, _ in encoded.tensors] == ["manifest.a"]
    assert len(encoded.data) < 1000


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


def test_enums_with_a_plain_value_travel_as_that() -> None:
    assert there_and_back([Colour.RED, Level.HIGH]) == ["red", 3]


def test_tensors_are_referred_to() -> None:
    known, other, parameter = torch.randn(3), torch.randn(4), nn.Parameter(torch.randn(2), requires_grad=False)
    value = {"a": known, "b": [other, other], "c": parameter, "d": torch.zeros(0), "e": known[1:]}
    encoded = encode_manifest(value, [("w", known)])
    assert [name for name, _ in encoded.tensors] == [
        "manifest.b[0]",
        "manifest.b[1]",
        "manifest.c",
        "manifest.d",
        "manifest.e",
    ]
    mine = torch.zeros(3)
    back = decode_manifest(encoded.data, {"w": mine, **dict(encoded.tensors)})
    assert back["a"] is mine
    assert isinstance(back["c"], nn.Parameter)
    assert not back["c"].requires_grad
    assert torch.equal(back["e"], known[1:])


def test_names_of_tensors_do_not_collide() -> None:
    encoded = encode_manifest({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, [("manifest.a.b", torch.zeros(9))])
    assert [name for name, _ in encoded.tensors] == ["manifest.a.b#2", "manifest.a.b#3"]
    back = decode_manifest(encoded.data, dict(encoded.tensors))
    assert back == {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}


class Foo:
    pass


class Vector(list):  # type: ignore[type-arg]
    pass


Pair = collections.namedtuple("Pair", "a b")


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"callbacks": {"EMA": {"shadow": Foo()}}}, r"callbacks\.EMA\.shadow: object of type Foo cannot travel"),
        ([0, {"f": lambda: 0}], r"\[1\]\.f: object of type function"),
        ({(1, 2): Foo()}, r"\[\(1, 2\)\]: object of type Foo"),
        ({Foo: 1}, r"key .*Foo.*: object of type type"),
        (enum.Enum("Odd", "A").A, "the manifest: object of type Odd cannot travel; store its value"),
        (Vector([1]), "object of type Vector"),
        (Pair(1, 2), "object of type Pair"),
        (np.array([Foo()]), "numpy type object is no plain number"),
        (np.zeros(2, dtype=[("a", "i4")]), "is no plain number"),
        (np.ma.zeros(2), "plain numpy array"),
        (collections.defaultdict(lambda: 0), "default factory"),
        (deep(200), "nested more than 100 levels"),
    ],
)
def test_what_cannot_travel_is_named(value: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        encode_manifest(value)


def test_a_value_within_itself_is_refused() -> None:
    value: dict[str, object] = {"a": {}}
    value["a"] = {"b": [value]}
    with pytest.raises(StateError, match=r"a\.b\[0\]: it contains itself"):
        encode_manifest(value)


def test_equal_sets_give_equal_bytes() -> None:
    names = [f"name{i}" for i in range(50)]
    assert encode_manifest(set(names)).data == encode_manifest({*names[::-1]}).data


KINDS = [
    "tuple", "set", "frozenset", "deque", "dict", "odict", "counter", "defaultdict", "tensor", "parameter",
    "bigarray", "array", "scalar", "float", "int", "bytes", "bytearray", "complex", "range", "slice",
    "datetime", "date", "time", "timedelta", "decimal", "fraction", "uuid", "path", "dtype", "device", "size",
    "os.system",
]  # fmt: skip
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "dtype", "shape", "max", "factory", "grad", "x"]), inner)
        | st.builds(
            lambda kind, v, extra: {**extra, "$": kind, "v": v},
            st.sampled_from(KINDS),
            inner,
            st.dictionaries(st.sampled_from(["dtype", "shape", "max", "factory", "grad"]), inner),
        )
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(TREES | st.binary())
def test_odd_manifests_are_refused_or_read_but_never_worse(tree: object) -> None:
    data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    with contextlib.suppress(WireError):
        decode_manifest(data, {"t": torch.zeros(1)})


@pytest.mark.parametrize(
    "text",
    [
        '{"$": "array", "v": "", "dtype": "O", "shape": []}',
        '{"$": "array", "v": "", "dtype": "U0", "shape": [1000000000000]}',
        '{"$": "array", "v": "AAAA", "dtype": "<f4", "shape": [1000000000000]}',
        '{"$": "pickle", "v": []}',
        '{"$": "dtype", "v": "nn"}',
        '{"$": "defaultdict", "v": [], "factory": "eval"}',
        '{"$": "tensor", "v": "unknown", "grad": false}',
        '{"$": "float", "v": "1"}',
        "[" * 5000,
        "NaN",
        '{"$": "set", "v": [[1]]}',
    ],
)
def test_named_oddities(text: str) -> None:
    with pytest.raises(WireError, match="anifest"):
        decode_manifest(text.encode())
