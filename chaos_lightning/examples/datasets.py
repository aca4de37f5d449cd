"""Data for the examples, without a download: English prose and real images that a machine has or can install.

Every member must see the same data in the same order of samples, for the position of a sample is all that the members
tell each other. So nothing here looks around for the best source it can find: a source is named, and a missing one is
an error that says how to get it. The one exception, FashionMNIST to digits, is asked for by name and says what it did.

| source | where it comes from |
|---|---|
| text "stdlib" | `pydoc_data.topics`, 465 kB of prose inside Python (its length differs between Python releases) |
| text "python-doc" | Debian's `python3.11-doc`, about 10 MB of reStructuredText |
| text PATH | a file, or a folder with WikiText's `wiki.train.tokens` (or `.raw`) and `wiki.valid.tokens` |
| FashionMNIST | Debian's `dataset-fashion-mnist`, 60 000 + 10 000 images as IDX files |
| digits | inside scikit-learn: 1 797 real images of 8x8 |
| CIFAR-10 | a folder with the "binary version": `data_batch_1.bin` ... `test_batch.bin` |
"""

from __future__ import annotations

import gzip
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from chaos_lightning.errors import ConfigurationError, needing

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
PYTHON_DOC = "/usr/share/doc/python3.11/html/_sources"


class MissingDataError(ConfigurationError, FileNotFoundError):
    """Error for a data set that is not on this machine; its message says where it was looked for and how to get it."""


# ---------------------------------------------------------------------------------------------------- text


def read_text(source: str = "stdlib") -> tuple[bytes, bytes]:
    """Returns training and validation text as bytes.

    Args:
        source: "stdlib", "python-doc", a text file, or a folder with WikiText's files. Without a validation file of its
            own, a source gives its last twentieth.
    """
    if source == "stdlib":
        from pydoc_data.topics import topics

        return _split("\n\n".join(topics[name] for name in sorted(topics)).encode())
    if source == "python-doc":
        files = sorted(Path(PYTHON_DOC).glob("**/*.rst.txt"))
        if not files:
            raise MissingDataError(f"no *.rst.txt below {PYTHON_DOC}: install Debian's python3.11-doc, or use 'stdlib'")
        return _split(b"\n\n".join(file.read_bytes() for file in files))
    path = Path(source)
    if path.is_file():
        return _split(path.read_bytes())
    for ending in ("tokens", "raw"):
        train, valid = path / f"wiki.train.{ending}", path / f"wiki.valid.{ending}"
        if train.is_file() and valid.is_file():
            return train.read_bytes(), valid.read_bytes()
    raise MissingDataError(
        f"no text at {source!r}: expected 'stdlib', 'python-doc', a text file, or a folder with wiki.train.tokens and "
        "wiki.valid.tokens (or .raw), as WikiText-2 and WikiText-103 are distributed"
    )


def _split(text: bytes) -> tuple[bytes, bytes]:
    cut = len(text) - len(text) // 20
    return text[:cut], text[cut:]


class ByteBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into blocks of `block` bytes that do not overlap. A sample is a block and, as target, the block one
    byte later.
    """

    def __init__(self, text: bytes, block: int) -> None:
        self.block = block
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if len(self) < 1:
            raise ValueError(f"{len(text)} bytes of text hold no block of {block} + 1 bytes: shorten `block`")

    def __len__(self) -> int:
        return max(0, (len(self.bytes) - 1) // self.block)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.bytes[index * self.block : (index + 1) * self.block + 1].long()
        return piece[:-1], piece[1:]


# ---------------------------------------------------------------------------------------------------- images

_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> np.ndarray:
    """Returns the array of an IDX file (the format of MNIST), plain or gzipped.

    The file is: two zero bytes, the element type, the number of dimensions, each dimension as 4 bytes, the elements;
    all of it big endian.
    """
    path = Path(path)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES:
        raise ValueError(f"{path} is no IDX file: it starts with {raw[:4].hex() or 'nothing'}")
    dtype, rank = np.dtype(_IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * rank
    if len(raw) < start:
        raise ValueError(f"{path} ends inside its header: {len(raw)} bytes, {rank} dimensions need {start}")
    shape = struct.unpack(f">{rank}I", raw[4:start])
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise ValueError(f"{path} has {len(raw)} bytes, but shape {shape} of {dtype} needs {expected}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def fashion_mnist(root: str | Path = FASHION_MNIST) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test set of FashionMNIST: float images (1, 28, 28) around zero, and labels 0..9."""

    def load(part: str) -> TensorDataset:
        arrays = []
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            found = [p for p in (Path(root) / name, Path(root) / f"{name}.gz") if p.is_file()]
            if not found:
                raise MissingDataError(
                    f"{root} has no {name}[.gz]: `apt-get install dataset-fashion-mnist`, or set `root` to a folder "
                    "with the four IDX files"
                )
            arrays.append(torch.from_numpy(read_idx(found[0])))
        images, labels = arrays
        if len(images) != len(labels):
            raise ValueError(f"{root}: {len(images)} images but {len(labels)} labels in part {part!r}")
        return TensorDataset((images.float().div(255) - 0.286).div(0.353).unsqueeze(1), labels.long())

    return load("train"), load("t10k")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns scikit-learn's handwritten digits: float images (1, 8, 8), labels 0..9; every fifth sample is for the
    test.
    """
    with needing("the data set of digits"):
        from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def cifar10(root: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Returns training and test set of CIFAR-10, read from the files of its binary version."""

    def load(names: list[str]) -> TensorDataset:
        parts = []
        for name in names:
            path = Path(root) / name
            if not path.is_file():
                raise MissingDataError(
                    f"{path} is missing: get the binary version of CIFAR-10 (not the Python one) and set `root` to "
                    "the folder that holds its .bin files"
                )
            raw = np.fromfile(path, np.uint8)
            if raw.size == 0 or raw.size % 3073:
                raise ValueError(f"{path} has {raw.size} bytes, which is no positive multiple of 3073")
            parts.append(raw.reshape(-1, 3073))
        records = torch.from_numpy(np.concatenate(parts))
        images = records[:, 1:].view(-1, 3, 32, 32).float().div(255)
        return TensorDataset((images - 0.473).div(0.251), records[:, 0].long())

    return load([f"data_batch_{i}.bin" for i in range(1, 6)]), load(["test_batch.bin"])


# ---------------------------------------------------------------------------------------------------- modules


Sets = tuple[Dataset[Any], Dataset[Any]]
"""Training set and validation set."""


class DataModule(L.LightningDataModule):
    """DataModule with loaders over a training and a validation set, which a subclass's `load` returns.

    `batch_size` counts the samples of one member and micro-batch: more members, more samples per step.
    """

    def __init__(self, batch_size: int, workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.workers = batch_size, workers
        self.sets: Sets | None = None

    def load(self) -> Sets:
        raise NotImplementedError(f"{type(self).__name__} must return its training and validation set")

    def setup(self, stage: str) -> None:
        if self.sets is None:
            self.sets = self.load()

    def _loader(self, which: int) -> DataLoader[Any]:
        if self.sets is None:
            self.setup("fit")
        assert self.sets is not None
        return DataLoader(self.sets[which], self.batch_size, shuffle=which == 0, num_workers=self.workers)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(0)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(1)


class TextData(DataModule):
    """DataModule of byte blocks of a text; `source` as in `read_text`, `block` in bytes."""

    def __init__(self, source: str = "stdlib", block: int = 64, batch_size: int = 16, workers: int = 0) -> None:
        super().__init__(batch_size, workers)
        self.source, self.block = source, block

    def load(self) -> Sets:
        train, valid = read_text(self.source)
        return ByteBlocks(train, self.block), ByteBlocks(valid, self.block)


class ImageData(DataModule):
    """DataModule of labelled images.

    Args:
        name: "fashion_mnist", "digits" or "cifar10".
        root: Folder of the files; "" means where Debian's package puts them (FashionMNIST only).
        batch_size: Samples per member and micro-batch.
        workers: Worker processes of each loader.
        fallback: Whether to use the digits, and warn, if FashionMNIST is not installed; then at all members alike.
    """

    def __init__(
        self,
        name: str = "fashion_mnist",
        root: str = "",
        batch_size: int = 32,
        workers: int = 0,
        fallback: bool = False,
    ) -> None:
        super().__init__(batch_size, workers)
        if name not in ("fashion_mnist", "digits", "cifar10"):
            raise ConfigurationError(f"unknown images {name!r}: expected 'fashion_mnist', 'digits' or 'cifar10'")
        self.name, self.root, self.fallback = name, root, fallback

    def load(self) -> Sets:
        if self.name == "digits":
            return digits()
        if self.name == "cifar10":
            return cifar10(self.root)
        try:
            return fashion_mnist(self.root or FASHION_MNIST)
        except MissingDataError as missing:
            if not self.fallback:
                raise
            warnings.warn(f"training on scikit-learn's digits instead: {missing}", stacklevel=2)
            return digits()
