"""Encodes all parts of a training state other than large tensors: typed values as JSON.

Theory of operation. Counters, hyperparameters, scheduler and callback states are plain Python values. JSON carries
most of them as they are; what it cannot say is an object with the key "$" naming the kind: `{"$": "tuple", "v":
[...]}`. The set of kinds is closed and written out here. Nothing is pickled and no name that arrives is ever imported
or looked up outside these tables. Tensors (and large numpy arrays) stay out of the text: `{"$": "tensor", "v": name}`
refers to the tensor table, by the name the tensor has among the replicated ones if it is one of those, else by its
path, as an *attached* tensor (see table.py).

What cannot travel is refused with its path, since silence would let a joiner run with half of a callback's state.
Values that are equal give equal bytes (sets are sorted), so two manifests can be compared by hash. Objects referred
to twice arrive as two equal objects; a value that contains itself is refused.
"""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication.table import DTYPES, Named, dtype_name

TAG = "$"
MAX_DEPTH = 100
INLINE_NBYTES = 1 << 16
"""Bytes above which numpy arrays travel like tensors."""
_ARRAY_KINDS = "biufcmMSU"
_WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_TENSOR_NAMES = frozenset([*_WHOLE, "bool", "float16", "float32", "float64", "complex64", "complex128"])
"""Names of the types that numpy and torch share."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str, "bool": bool, "tuple": tuple
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """Text of a manifest, and the attached tensors that the text refers to."""

    data: bytes
    tensors: tuple[tuple[str, Tensor], ...]


def encode_manifest(value: object, known: Named = ()) -> Encoded:
    """Encodes a manifest; raises StateError that names the first value which cannot be encoded.

    Args:
        value: Usually a dict of state dicts.
        known: The replicated tensors: one that turns up within `value` is referred to by its name there.
    """
    encoder = _Encoder(known)
    tree = encoder.encode(value, "", 0)
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("utf-8", "surrogatepass")
    return Encoded(data, tuple(encoder.attached))


def decode_manifest(data: bytes, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Reads a manifest that `encode_manifest` wrote; raises WireError for anything else.

    Args:
        data: The text.
        tensors: All tensors that the text refers to, by name. They are put into the result as they are, so they may be
            filled later.
    """
    try:
        tree = json.loads(data.decode("utf-8", "surrogatepass"), parse_constant=_refuse_constant)
        return _Decoder(tensors or {}).decode(tree)
    except WireError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError, RuntimeError) as error:
        raise WireError(f"malformed manifest: {error!r}") from error


def _refuse_constant(text: str) -> None:
    raise WireError(f"malformed manifest: the bare constant {text}")


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def _tagged(kind: str, value: object, **more: object) -> dict[str, object]:
    return {TAG: kind, "v": value, **more}


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


class _Encoder:
    def __init__(self, known: Named) -> None:
        self.attached: list[tuple[str, Tensor]] = []
        self._names: dict[tuple[object, ...], str] = {}
        self._used: set[str] = set()
        self._open: set[int] = set()
        for name, tensor in known:
            self._used.add(name)
            if tensor.numel():
                self._names.setdefault(_identity(tensor), name)

    def encode(self, value: Any, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise StateError(f"{path or 'the manifest'}: nested more than {MAX_DEPTH} levels deep; flatten it")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:  # Python limits how many decimal digits it reads
            return value if value.bit_length() < 4096 else _tagged("int", hex(value))
        if kind is str:
            return str(value)
        if kind is float:
            return value if math.isfinite(value) else _tagged("float", repr(value))
        simple = _SIMPLE.get(kind)
        if simple is not None:
            tag, write = simple
            return _tagged(tag, write(value))
        if isinstance(value, enum.Enum):
            if isinstance(value, enum.StrEnum | enum.IntEnum):
                return self.encode(value.value, path, depth)
            raise self._refusal(value, path, "store its value or name instead of the enum member")
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        if isinstance(value, pathlib.PurePath):
            return _tagged("path", value.as_posix())
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> object:
        if id(value) in self._open:
            raise StateError(f"{path or 'the manifest'}: it contains itself and cannot be written as a tree")
        self._open.add(id(value))
        try:
            kind = type(value)
            if kind in (list, tuple, collections.deque):
                items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
                if kind is list:
                    return items
                if kind is tuple:
                    return _tagged("tuple", items)
                return _tagged("deque", items, max=value.maxlen)
            if kind in (set, frozenset):
                texts = [json.dumps(self.encode(v, f"{path}{{{v!r}}}", depth + 1), allow_nan=False) for v in value]
                return _tagged(kind.__name__, [json.loads(t) for t in sorted(texts)])
            if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
                return self._mapping(value, path, depth)
        finally:
            self._open.discard(id(value))
        raise self._refusal(value, path, "keep plain values, containers and tensors in the state, or leave it out")

    def _mapping(self, value: Any, path: str, depth: int) -> object:
        kind = type(value)
        if kind is dict and all(type(k) is str for k in value) and TAG not in value:
            return {k: self.encode(v, _join(path, k), depth + 1) for k, v in value.items()}
        rows = [
            [self.encode(k, f"{path} key {k!r}", depth + 1), self.encode(v, _join(path, k), depth + 1)]
            for k, v in value.items()
        ]
        if kind is collections.defaultdict:
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and _FACTORIES.get(name) is not factory:
                raise self._refusal(value, path, f"its default factory {factory!r} is none of {sorted(_FACTORIES)}")
            return _tagged("defaultdict", rows, factory=name)
        names: dict[type, str] = {dict: "dict", collections.OrderedDict: "odict", collections.Counter: "counter"}
        return _tagged(names[kind], rows)

    def _tensor(self, value: Tensor, path: str) -> object:
        known = self._names.get(_identity(value)) if _has_memory(value) else None
        name = known or self._attach(value.detach(), path)
        kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
        return _tagged(kind, name, grad=bool(value.requires_grad and value.is_leaf))

    def _attach(self, tensor: Tensor, path: str) -> str:
        base = f"manifest.{path}"
        name, number = base, 2
        while name in self._used:
            name, number = f"{base}#{number}", number + 1
        self._used.add(name)
        self.attached.append((name, tensor))
        return name

    def _array(self, value: np.ndarray[Any, Any] | np.generic, path: str) -> object:
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise self._refusal(value, path, "convert it to a plain numpy array")
        if value.dtype.kind not in _ARRAY_KINDS or not value.dtype.itemsize:
            raise self._refusal(value, path, f"numpy type {value.dtype} is no plain number or text")
        if isinstance(value, np.generic):
            return _tagged("scalar", _base64(value.tobytes()), dtype=value.dtype.str)
        if value.nbytes > INLINE_NBYTES and value.dtype.isnative and value.dtype.name in _TENSOR_NAMES:
            writable = np.array(value, order="C")
            return _tagged("bigarray", self._attach(torch.from_numpy(writable), path))
        return _tagged("array", _base64(value.tobytes()), dtype=value.dtype.str, shape=list(value.shape))

    @staticmethod
    def _refusal(value: object, path: str, advice: str) -> StateError:
        kind = type(value).__qualname__
        return StateError(f"{path or 'the manifest'}: object of type {kind} cannot travel; {advice}")


def _has_memory(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_meta and value.numel() > 0


def _join(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


_SIMPLE: dict[type, tuple[str, Callable[[Any], object]]] = {
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    complex: ("complex", repr),
    range: ("range", lambda v: [v.start, v.stop, v.step]),
    slice: ("slice", lambda v: [v.start, v.stop, v.step]),
    datetime.datetime: ("datetime", lambda v: v.isoformat()),
    datetime.date: ("date", lambda v: v.isoformat()),
    datetime.time: ("time", lambda v: v.isoformat()),
    datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    decimal.Decimal: ("decimal", str),
    fractions.Fraction: ("fraction", lambda v: [v.numerator, v.denominator]),
    uuid.UUID: ("uuid", lambda v: v.hex),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
    torch.Size: ("size", list),
}


def _fixed(value: Any, count: int, *kinds: type) -> list[Any]:
    if type(value) is not list or len(value) != count or any(type(v) not in kinds for v in value):
        raise WireError(f"malformed manifest: {value!r} should be {count} values")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise WireError(f"malformed manifest: {value!r} should be text")
    return value


def _array_dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(_text(name))
    if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize or dtype.hasobject:
        raise WireError(f"malformed manifest: numpy type {name!r} is no plain number or text")
    return dtype


def _nonfinite(value: Any) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise WireError(f"malformed manifest: {value!r} is no special float")
    return float(value)


_READ: dict[str, Callable[[Any], Any]] = {
    "float": _nonfinite,
    "int": lambda v: int(_text(v), 16),
    "bytes": lambda v: base64.b64decode(_text(v), validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(_text(v), validate=True)),
    "complex": lambda v: complex(_text(v)),
    "range": lambda v: range(*_fixed(v, 3, int)),
    "slice": lambda v: slice(*_fixed(v, 3, int, type(None))),
    "datetime": lambda v: datetime.datetime.fromisoformat(_text(v)),
    "date": lambda v: datetime.date.fromisoformat(_text(v)),
    "time": lambda v: datetime.time.fromisoformat(_text(v)),
    "timedelta": lambda v: datetime.timedelta(*_fixed(v, 3, int)),
    "decimal": lambda v: decimal.Decimal(_text(v)),
    "fraction": lambda v: fractions.Fraction(*_fixed(v, 2, int)),
    "uuid": lambda v: uuid.UUID(hex=_text(v)),
    "path": lambda v: pathlib.Path(_text(v)),
    "dtype": lambda v: DTYPES[_text(v)],
    "device": lambda v: torch.device(_text(v)),
    "size": lambda v: torch.Size(_fixed(v, len(v), int)),
}


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def decode(self, tree: Any, depth: int = 0) -> Any:
        if depth > 2 * MAX_DEPTH:
            raise WireError("malformed manifest: nested too deep")
        if isinstance(tree, list):
            return [self.decode(v, depth + 1) for v in tree]
        if not isinstance(tree, dict):
            return tree
        if TAG not in tree:
            return {k: self.decode(v, depth + 1) for k, v in tree.items()}
        kind, value = _text(tree[TAG]), tree["v"]
        if kind in _READ:
            return _READ[kind](value)
        if kind in ("tensor", "parameter"):
            return self._tensor(kind, value, bool(tree["grad"]))
        if kind == "bigarray":
            return self._find(value).numpy()
        if kind in ("array", "scalar"):
            return self._array(kind, value, tree)
        if type(value) is not list:
            raise WireError(f"malformed manifest: {kind!r} without a list")
        if kind in ("dict", "odict", "counter", "defaultdict"):
            return self._mapping(kind, value, tree, depth)
        items = [self.decode(v, depth + 1) for v in value]
        if kind == "tuple":
            return tuple(items)
        if kind == "set":
            return set(items)
        if kind == "frozenset":
            return frozenset(items)
        if kind == "deque":
            return collections.deque(items, tree["max"])
        raise WireError(f"malformed manifest: unknown kind {kind!r}")

    def _mapping(self, kind: str, value: list[Any], tree: dict[str, Any], depth: int) -> Any:
        rows = [(self.decode(k, depth + 1), self.decode(v, depth + 1)) for k, v in value]
        if kind == "odict":
            return collections.OrderedDict(rows)
        if kind == "counter":
            return collections.Counter(dict(rows))
        if kind == "defaultdict":
            name = tree["factory"]
            return collections.defaultdict(None if name is None else _FACTORIES[name], rows)
        return dict(rows)

    def _find(self, name: Any) -> Tensor:
        tensor = self._tensors.get(_text(name))
        if tensor is None:
            raise WireError(f"malformed manifest: it refers to tensor {name!r}, which the state table does not have")
        return tensor

    def _tensor(self, kind: str, name: Any, grad: bool) -> Tensor:
        tensor = self._find(name)
        if kind == "parameter" and not isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, requires_grad=grad)
        if grad and not tensor.requires_grad and tensor.is_leaf:
            tensor = tensor.detach().requires_grad_()
        return tensor

    @staticmethod
    def _array(kind: str, value: Any, tree: dict[str, Any]) -> Any:
        dtype = _array_dtype(tree["dtype"])
        shape = [] if kind == "scalar" else _fixed(tree["shape"], len(tree["shape"]), int)
        data = base64.b64decode(_text(value), validate=True)
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        return array[()] if kind == "scalar" else array


def decode_values(text: bytes, tensors: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """Decodes the manifest of a state, a mapping of values by name; raises WireError for anything else.

    Raises:
        WireError: The text cannot be decoded, or is no mapping.
    """
    found = decode_manifest(text, tensors)
    if not isinstance(found, Mapping):
        raise WireError(f"malformed manifest: a {type(found).__name__} instead of values by name")
    return found


@contextmanager
def fitting() -> Iterator[None]:
    """Context manager that turns errors in reading a decoded manifest (missing keys, wrong types) into StateError,
    since another program may have made it.

    Raises:
        StateError: Something was looked for in vain.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise StateError(
            f"the donor's manifest does not fit what is trained here ({type(error).__name__}: {error}); all members "
            "must run the same program with the same release"
        ) from error
