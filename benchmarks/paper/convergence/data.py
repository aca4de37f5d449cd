"""Real data for the convergence figures, assigned to five nodes so that each has most samples of some kinds.

Theory of operation. Samples have kinds: the ten classes of FashionMNIST, or five sorts of source code. Every node owns
some kinds, and `assign_kinds` gives each node equally many samples, most of them of its own kinds. All five nodes
together hold every kind equally often; without one of them its kinds are rare. That is why coming and going shows.

Nothing is downloaded: FashionMNIST is Debian's dataset-fashion-mnist, prose and code come with Python and torch.
"""

from __future__ import annotations

import gzip
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FASHION_MNIST = "/usr/share/datasets/fashion-mnist"
NODES = 5
"""Nodes that have data; the last one comes or goes."""
CLASSES = 10
BLOCK = 64
"""Bytes of text that the GPT sees at once."""
PIXEL_MEAN, PIXEL_DEVIATION = 0.286, 0.353
PYTHON_SORTS = (
    ("asyncio", "concurrent", "multiprocessing", "threading.py", "socket.py", "selectors.py", "subprocess.py"),
    ("email", "http", "urllib", "html", "xml", "smtplib.py", "ftplib.py"),
    ("unittest", "doctest.py", "pdb.py", "inspect.py", "traceback.py", "trace.py", "profile.py"),
    ("json", "logging", "importlib", "zipfile.py", "tarfile.py", "argparse.py", "_pydecimal.py", "statistics.py"),
)
"""Parts of Python's own library, by sort of text; the fifth sort is C++, torch's headers."""


@dataclass(frozen=True)
class Samples:
    """Samples of one node, or of the test set.

    Attributes:
        inputs: uint8; images as (n, 28, 28), text as (n, BLOCK + 1).
        kinds: int64 (n,); the class of an image, the sort of a text.
    """

    inputs: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.kinds)

    def take(self, index: np.ndarray) -> Samples:
        return Samples(self.inputs[index], self.kinds[index])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns the model's inputs and targets: images and classes, or bytes and the bytes that follow them."""
        inputs = torch.from_numpy(np.ascontiguousarray(self.inputs))
        if self.inputs.ndim == 2:
            return inputs[:, :-1].long(), inputs[:, 1:].long()
        pixels = inputs.float().div_(255).sub_(PIXEL_MEAN).div_(PIXEL_DEVIATION)
        return pixels.unsqueeze(1), torch.from_numpy(np.ascontiguousarray(self.kinds))


class Stream:
    """Endless samples of one node's own data: pass after pass, each in a new order.

    Without end, because a node that comes in the middle of an epoch with a finite share would be the only one with
    samples left at that epoch's end.

    Args:
        samples: the node's share; a multiple of `batch` many.
        batch: samples per step.
        seed: keys the orders.
    """

    def __init__(self, samples: Samples, batch: int, seed: int) -> None:
        if batch < 1 or len(samples) < batch or len(samples) % batch:
            raise ValueError(
                f"{len(samples)} samples in batches of {batch}: expected a multiple of the batch, at least 1"
            )
        self.samples, self.batch, self.seed = samples, batch, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rng = np.random.default_rng(self.seed)
        while True:
            order = rng.permutation(len(self.samples))
            for start in range(0, len(order), self.batch):
                yield self.samples.take(order[start : start + self.batch]).tensors()


def owners(kinds: int, nodes: int, seed: int) -> list[list[int]]:
    """Returns the kinds of samples that each node has most of: equally many per node, drawn by `seed`."""
    if kinds % nodes:
        raise ValueError(f"{kinds} kinds cannot be owned by {nodes} nodes alike: expected a multiple")
    drawn = np.random.default_rng(seed).permutation(kinds).reshape(nodes, -1)
    return [[int(kind) for kind in row] for row in drawn]


def assign_kinds(
    kinds: np.ndarray, owned: Sequence[Sequence[int]], *, per_node: int, own: float, seed: int
) -> list[np.ndarray]:
    """Assigns samples to nodes; equally many each, no sample twice.

    Args:
        kinds: (n,) the kind of every sample there is.
        owned: the kinds of each node.
        per_node: samples of a node.
        own: the part of a node's samples that is of its own kinds; the rest is spread evenly over all other kinds. With
            1 / nodes all nodes have the same mixture, with 1 each has its own kinds only.
        seed: draws the samples.

    Returns:
        For each node the positions of its samples, in random order.

    Raises:
        ValueError: the numbers do not divide evenly, or some kind has too few samples.
    """
    nodes, each = len(owned), len(owned[0])
    own_each, rest = divmod(round(own * per_node), each)
    others_each, rest2 = divmod(per_node - round(own * per_node), max(1, each * (nodes - 1)))
    if rest or rest2:
        raise ValueError(
            f"{per_node} samples a node, {own:g} of them of its own kinds, cannot be spread evenly over {each} own "
            f"kinds and {each * (nodes - 1)} others: choose a multiple"
        )
    rng = np.random.default_rng(seed)
    piles = {kind: iter(rng.permutation(np.flatnonzero(kinds == kind))) for row in owned for kind in row}
    shares = []
    for mine in owned:
        drawn: list[int] = []
        for kind, pile in piles.items():
            want = own_each if kind in mine else others_each
            got = [int(next(pile, -1)) for _ in range(want)]
            if -1 in got:
                raise ValueError(f"kind {kind} has {np.sum(kinds == kind)} samples, which is too few for all nodes")
            drawn += got
        shares.append(rng.permutation(np.array(drawn, dtype=np.int64)))
    return shares


@lru_cache(maxsize=2)
def fashion_images(part: str, root: str | Path = FASHION_MNIST) -> Samples:
    """Returns FashionMNIST's "train" or "t10k", from two gzipped IDX files.

    Not read by `chaos_lightning.examples.datasets`, which imports Lightning: that takes longer than a quick figure.

    Raises:
        FileNotFoundError: a file is not there; the message says which package has it.
        ValueError: a file is not what its name says.
    """
    found = []
    for what, rank in (("images-idx3", 3), ("labels-idx1", 1)):
        path = Path(root) / f"{part}-{what}-ubyte.gz"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: `apt-get install dataset-fashion-mnist`")
        raw = gzip.decompress(path.read_bytes())
        start = 4 + 4 * rank
        shape = tuple(int(n) for n in np.frombuffer(raw[4:start], dtype=">u4"))
        if raw[:4] != bytes((0, 0, 8, rank)) or len(raw) != start + math.prod(shape):
            raise ValueError(f"{path} is no IDX file of bytes in {rank} dimensions: {len(raw)} bytes, shape {shape}")
        found.append(np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape))
    return Samples(found[0], found[1].astype(np.int64))


def prose_text() -> bytes:
    """Returns English prose that comes with Python: the reference behind `help()`, 0.5 MB."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def source_texts() -> list[bytes]:
    """Returns five sorts of source code that come with Python and torch: four of Python, then C++.

    The texts differ a little between releases of Python and torch.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for places in PYTHON_SORTS:
        files = [
            f for p in places for f in ([library / p] if p.endswith(".py") else sorted((library / p).rglob("*.py")))
        ]
        texts.append(b"\n".join(f.read_bytes() for f in files if f.is_file()))
    headers = sorted((Path(torch.__file__).parent / "include" / "ATen" / "core").glob("*.h"))
    texts.append(b"\n".join(f.read_bytes() for f in headers))
    return texts


def text_blocks(texts: Sequence[bytes], per_sort: int, seed: int, *, test: bool) -> Samples:
    """Returns blocks of BLOCK + 1 bytes, equally many of each sort of text; the last fifth of each text is for the test
    only.

    Raises:
        ValueError: a text is too short.
    """
    rng = np.random.default_rng(seed)
    blocks, kinds = [], []
    for sort, text in enumerate(texts):
        cut = len(text) * 4 // 5
        part = np.frombuffer(text[cut:] if test else text[:cut], dtype=np.uint8)
        there = len(part) // (BLOCK + 1)
        if there < per_sort:
            raise ValueError(f"text {sort} has {there} blocks of {BLOCK + 1} bytes for this, {per_sort} are needed")
        rows = part[: there * (BLOCK + 1)].reshape(there, BLOCK + 1)
        blocks.append(rows[np.sort(rng.permutation(there)[:per_sort])])
        kinds.append(np.full(per_sort, sort, dtype=np.int64))
    return Samples(np.concatenate(blocks), np.concatenate(kinds))
