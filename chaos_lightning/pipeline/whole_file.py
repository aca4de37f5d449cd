"""Writes a checkpoint of the whole model at a member that has only some parts of it; the others come from other
members.

Theory of operation. The file is what `torch.save` writes where the whole model is in one process. torch lays it out
without the bytes of tensors (`torch.serialization.skip_data`), and tensors that are absent here stand in it as fake
ones, with type, shape and device, but without memory. What lies between the tensors' bytes is small and is written
first. Then come the tensors that are here, and after them the parts that others hold, one at a time, each tensor at its
place. So there is never more in memory than this member's parts and one other. At last the records get their checksums,
at which torch does not look, but other readers of zip archives do.

What optimizers keep for absent parameters is not known here: an owner of the part describes it (`PartState.manifest`).
Whatever a checkpoint holds of an absent tensor is recognized by its memory, that of the stand-in. Its shape may be
looked at, its values may not (`AbsentTensor`).
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.serialization import skip_data
from torch.storage import TypedStorage, UntypedStorage
from torch.utils._pytree import tree_iter

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.parts import ModelParts
from chaos_lightning.replication.access import module_tensors, rebuild
from chaos_lightning.replication.memory import region, synchronize

PIECE_NBYTES = 4 << 20
"""Number of bytes that are written at a time."""
_DESCRIPTOR, _ENTRY = b"PK\x07\x08", b"PK\x01\x02"
"""Marks of zip archives: of the descriptor after a record's bytes, and of a record's entry in the directory at the
end.
"""


class PartSource(Protocol):
    """Interface to the parts that other members hold (member/part_moves.py)."""

    def manifest(self, part: str) -> Mapping[str, Any]:
        """Returns the description of a part, without its tensors, from an owner."""

    def tensors(self, part: str) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, tensor) for the tensors of a part, with names as in `PartState.tensors`."""


@dataclass(frozen=True)
class PartialModel:
    """Model of which this member has only some parts.

    Attributes:
        root: The model, with stand-ins for what is absent.
        parts: The model's parts.
        optimizers: Optimizers of the whole model.
    """

    root: nn.Module
    parts: ModelParts
    optimizers: Sequence[Optimizer] = ()

    def absent(self) -> dict[int, tuple[str, Tensor]]:
        """Returns the stand-ins of absent tensors with their names, by the id of the memory that they use."""
        return {storage_of(t): (name, t) for name, t in module_tensors(self.root) if is_absent(t)}

    def lacking(self) -> list[str]:
        """Returns the parts with absent tensors, in the order of parts."""
        names = {_plain(name) for name, _ in self.absent().values()}
        if unknown := sorted(names.difference(self.parts.part_of)):
            raise StateError(f"{unknown[0]!r} is absent here and of no part; was it added to the model later?")
        found = {self.parts.part_of[name] for name in names}
        return [part for part in self.parts.users if part in found]


def storage_of(tensor: Tensor) -> int:
    """Returns an id of the memory that a tensor uses; 0 for tensors without memory of their own."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a sparse one, or a wrapper
            return 0


def write_whole(path: Path, checkpoint: Mapping[str, Any], model: PartialModel, source: PartSource) -> None:
    """Writes a checkpoint of the whole model.

    Args:
        path: The file, which is flushed to the disk; to be moved to its place by the caller.
        checkpoint: Checkpoint as this member has made it; states of other members' parameters are added to its
            "optimizer_states".
        model: This member's part of the model.
        source: Source of the other parts.

    Raises:
        StateError: A part does not come or does not fit, or the checkpoint uses values that are not here.
        OSError: The file cannot be written.
    """
    WholeFile(checkpoint, model, source).write(path)


class WholeFile:
    """Layout of a checkpoint file, and its writer.

    Args:
        checkpoint: See `write_whole`.
        model: See `write_whole`.
        source: See `write_whole`.

    Attributes:
        nbytes: Size of the file.
    """

    def __init__(self, checkpoint: Mapping[str, Any], model: PartialModel, source: PartSource) -> None:
        self._model, self._source = model, source
        self._absent = model.absent()
        self._fakes: dict[str, Tensor] = {}
        """Fake tensors of absent ones that are in the checkpoint, by their names in parts."""
        self._parts: set[str] = set()
        """Parts to which the fake tensors belong."""
        self._mode = FakeTensorMode()
        whole = dict(checkpoint)
        if self._absent and whole.get("optimizer_states"):
            whole["optimizer_states"] = self._whole_states(whole["optimizer_states"])
        self._skeleton, self._storages = self._lay_out(whole)
        self.nbytes = self._skeleton.nbytes

    # ------------------------------------------------------------------ layout

    def _fake(self, name: str, dtype: torch.dtype, shape: Sequence[int], device: torch.device, part: str) -> Tensor:
        if name not in self._fakes:
            self._parts.add(part)
            with self._mode:
                self._fakes[name] = torch.empty(shape, dtype=dtype, device=device)
        return self._fakes[name]

    def _whole_states(self, given: Sequence[Any]) -> list[Any]:
        """Returns optimizer states completed with those of absent parameters."""
        optimizers = self._model.optimizers
        manifests = {part: self._source.manifest(part)["optimizers"] for part in self._model.lacking()}
        for part, theirs in manifests.items():
            if (found := [m["kind"] for m in theirs]) != (own := [type(o).__qualname__ for o in optimizers]):
                raise StateError(f"the owner of {part} has the optimizers {found}, this member {own}")
        return [
            self._whole_state(number, optimizer, state, {part: m[number]["state"] for part, m in manifests.items()})
            for number, (optimizer, state) in enumerate(zip(optimizers, given, strict=True))
        ]

    def _whole_state(
        self, number: int, optimizer: Optimizer, given: Any, described: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Returns one optimizer's state for all parameters, keyed by parameter number as in torch."""
        whole = dict(_kept(given, optimizer))
        names = {id(p): name for name, p in self._model.root.named_parameters()}
        places: dict[str, tuple[int, Tensor]] = {}
        for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            places.setdefault(names.get(id(p), ""), (at, p))
        for part, trees in described.items():
            for name, tree in trees.items():
                if name not in places:
                    raise StateError(f"the owner of {part} has state for {name!r}, which is not stepped here")
                at, p = places[name]
                if at not in whole:
                    whole[at] = rebuild(tree, None, f"optim{number}.{name}", self._maker(part, p.device))
        # In order, as an optimizer comes upon its parameters; behind them what it keeps for none of them.
        order = sorted(whole, key=lambda key: key if isinstance(key, int) else sys.maxsize)
        return {**given, "state": {key: whole[key] for key in order}}

    def _maker(self, part: str, device: torch.device) -> Callable[..., Tensor]:
        def make(name: str, _: Any, dtype: torch.dtype, shape: tuple[int, ...], is_beside: bool) -> Tensor:
            return self._fake(name, dtype, shape, device if is_beside else torch.device("cpu"), part)

        return make

    def _for_absent(self, tensor: Tensor) -> Tensor | None:
        """Returns the fake tensor to be written in place of an absent one; None if the tensor is here."""
        found = self._absent.get(storage_of(tensor))
        if found is None:
            return None
        name, stands_in = found
        with torch._C.DisableTorchFunctionSubclass():
            same = tensor.shape == stands_in.shape and tensor.dtype == stands_in.dtype
        if not same:
            raise StateError(f"the checkpoint holds something made of {_plain(name)!r}; {_ELSEWHERE}")
        part = self._model.parts.part_of[_plain(name)]
        return self._fake(name, stands_in.dtype, stands_in.shape, stands_in.device, part)

    def _lay_out(self, whole: dict[str, Any]) -> tuple[_Skeleton, dict[str, UntypedStorage]]:
        """Lets torch lay out the file without tensor bytes; returns the remaining bytes, and the storages by name."""
        storages: dict[str, UntypedStorage] = {}
        skeleton, for_absent = _Skeleton(), self._for_absent

        class Pickler(pickle.Pickler):
            """Pickler from which torch derives its own; it notes storages and replaces absent tensors by fake ones."""

            def __init_subclass__(cls) -> None:
                theirs = cls.persistent_id

                def persistent_id(self: Any, value: Any) -> Any:
                    found = theirs(self, value)
                    if found is not None:
                        storages[found[2]] = value._untyped_storage if isinstance(value, TypedStorage) else value
                    return found

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

            def reducer_override(self, value: Any) -> Any:
                fake = for_absent(value) if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else None
                return NotImplemented if fake is None else cast(Any, fake).__reduce_ex__(2)

        with skip_data(materialize_fake_tensors=True):
            torch.save(whole, cast(Any, skeleton), pickle_module=SimpleNamespace(__name__="pickle", Pickler=Pickler))
        return skeleton, {key: storage for key, storage in storages.items() if storage.nbytes()}

    # ------------------------------------------------------------------ the file

    def write(self, path: Path) -> None:
        """Writes the checkpoint file; see `write_whole`."""
        places = dict(zip(self._storages, self._skeleton.gaps, strict=True))
        fakes = {storage_of(t): name for name, t in self._fakes.items()}
        awaited = {fakes[s._cdata]: key for key, s in self._storages.items() if s._cdata in fakes}
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            _check_room(fd, path, self.nbytes)
            os.ftruncate(fd, self.nbytes)
            for at, data in self._skeleton.pieces:
                _put(fd, memoryview(data), at)
            sums: dict[str, int] = {}
            for key, storage in self._storages.items():
                if storage._cdata not in fakes:
                    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    sums[key] = _copy(fd, key, flat, places[key])
            for part in (part for part in self._model.parts.users if part in self._parts):
                for key, crc in self._write_part(fd, part, awaited, places):
                    sums[key] = crc
            if awaited:
                raise StateError(f"{min(awaited)!r} did not come from its owner; expected it for the checkpoint")
            _put_sums(fd, path, {key: (places[key], crc) for key, crc in sums.items()})
            os.fsync(fd)
        finally:
            os.close(fd)

    def _write_part(
        self, fd: int, part: str, awaited: dict[str, str], places: Mapping[str, tuple[int, int]]
    ) -> list[tuple[str, int]]:
        """Writes a part's tensors, received from another member, into the file; returns the checksums of their
        records.
        """
        sums = []
        for name, tensor in self._source.tensors(part):
            if name in awaited:
                self._check(name, tensor)
                key = awaited.pop(name)
                sums.append((key, _copy(fd, name, tensor, places[key])))
        return sums

    def _check(self, name: str, tensor: Tensor) -> None:
        wanted = self._fakes[name]
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise StateError(
                f"{name!r} came as {tensor.dtype}{list(tensor.shape)}, expected {wanted.dtype}{list(wanted.shape)}; "
                "start all members with the same model and optimizers"
            )


def _kept(state: Any, optimizer: Optimizer) -> Mapping[Any, Any]:
    """Returns an optimizer's state entries, keyed by parameter number."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise StateError(
            f"{type(optimizer).__qualname__}.state_dict() has a form of its own, which members with parts of the model "
            "cannot put together; expected 'state' and 'param_groups' as torch's optimizers have them"
        )
    return cast(Mapping[Any, Any], state["state"])


class _Skeleton:
    """File object that records what torch writes, and the gaps that it leaves for the bytes of tensors."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.gaps: list[tuple[int, int]] = []
        """Beginning and end of each gap."""
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self.pieces.append((self.nbytes, bytes(data)))
        self.nbytes += len(self.pieces[-1][1])
        return len(self.pieces[-1][1])

    def seek(self, nbytes: int, whence: int) -> int:
        assert whence == os.SEEK_CUR, "torch leaves out the bytes of tensors by going on"
        self.gaps.append((self.nbytes, self.nbytes + nbytes))
        self.nbytes += nbytes
        return self.nbytes

    def flush(self) -> None:
        pass


def _check_room(fd: int, path: Path, nbytes: int) -> None:
    """Raises OSError if the disk has no room for the file, before other members send their parts."""
    disk = os.fstatvfs(fd)
    if disk.f_bavail * disk.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


def _put(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        data, at = data[done:], at + done


def _copy(fd: int, name: str, tensor: Tensor, place: tuple[int, int]) -> int:
    """Writes a tensor's bytes into its gap in the file; returns their checksum."""
    start, stop = place
    synchronize((tensor,))
    source = region(name, tensor)
    if source.nbytes != stop - start:
        raise StateError(f"{name!r} has {source.nbytes} bytes, its place in the file {stop - start}")
    crc = 0
    for at in range(0, source.nbytes, PIECE_NBYTES):
        piece = source.read(at, min(at + PIECE_NBYTES, source.nbytes))
        crc = zlib.crc32(piece, crc)
        _put(fd, piece, start + at)
    return crc


def _put_sums(fd: int, path: Path, sums: Mapping[str, tuple[tuple[int, int], int]]) -> None:
    """Writes the records' checksums into the zip archive: after their bytes, and in its directory."""
    for (_, stop), crc in sums.values():
        assert os.pread(fd, 4, stop) == _DESCRIPTOR, "torch writes a descriptor behind each record"
        os.pwrite(fd, struct.pack("<I", crc), stop + 4)
    with zipfile.ZipFile(path) as archive:
        at = archive.start_dir
        for info in archive.infolist():
            assert os.pread(fd, 4, at) == _ENTRY, "an archive's directory has an entry for each record"
            _, _, key = info.orig_filename.rpartition("/data/")
            if key in sums:
                os.pwrite(fd, struct.pack("<I", sums[key][1]), at + 16)
            at += 46 + len(info.orig_filename.encode()) + len(info.extra) + len(info.comment)


# ------------------------------------------------------------------------------------------------ absent values

_ELSEWHERE = (
    "its values are at other members. A checkpoint may name such tensors and leave some out, but do nothing with their "
    "values: do that with the file, after it was written"
)
_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf is_meta is_cuda is_sparse is_quantized nbytes itemsize"
)
_SHAPE_ONLY = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.storage_offset, Tensor.__len__),
        *(Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex),
        Tensor.untyped_storage,
    ]
)


class AbsentTensor(Tensor):
    """Stand-in in a state dict for a tensor that other members hold: has a shape, but refuses access to its values."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.dtype}{list(self.shape)} at other members>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if _gives_itself(func, args):
                return args[0]
            if func in _SHAPE_ONLY:
                return func(*args, **(kwargs or {}))
        raise StateError(f"{_name(func)}() is called on a tensor of a state dict; {_ELSEWHERE}")


class _NoValues(TorchFunctionMode):
    """Mode that refuses any use of the values of absent tensors.

    Args:
        absent: Absent tensors, from `PartialModel.absent`.
    """

    def __init__(self, absent: Mapping[int, tuple[str, Tensor]]) -> None:
        super().__init__()
        self._absent = absent

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)) if func not in _SHAPE_ONLY else ():
            found = self._absent.get(storage_of(value)) if isinstance(value, Tensor) else None
            if found is not None and _gives_itself(func, args):
                return args[0] if isinstance(args[0], AbsentTensor) else func(*args).as_subclass(AbsentTensor)
            if found is not None:
                raise StateError(f"state_dict() calls {_name(func)}() on {_plain(found[0])!r}; {_ELSEWHERE}")
        return func(*args, **(kwargs or {}))


def _gives_itself(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether a function gives back an absent tensor itself (`detach`, or `cpu` on a CPU)."""
    return func is Tensor.detach or (func is Tensor.cpu and args[0].device.type == "cpu")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _plain(name: str) -> str:
    """Returns the name of a tensor in the model, from its name in a part state."""
    return name.partition(".")[2]


def partial_state_dict(root: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model, with an `AbsentTensor` for each absent tensor.

    Raises:
        StateError: The model's own `state_dict` uses values that are not here.
    """
    with _NoValues(PartialModel(root, ModelParts(0, {}, {})).absent()):
        return root.state_dict()


__all__ = ["AbsentTensor", "PartSource", "PartialModel", "WholeFile", "partial_state_dict", "write_whole"]
