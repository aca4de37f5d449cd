"""Tests the examples' data sets: real ones if installed, otherwise files of the same format made here."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch


def write_idx(path: Path, array: np.ndarray, kind: int) -> None:
    raw = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_fashion(root: Path, *, images: int = 5, labels: int = 5, suffix: str = ".gz") -> None:
    generator = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pixels = generator.integers(0, 256, (images, 28, 28), dtype=np.uint8)
        write_idx(root / f"{part}-images-idx3-ubyte{suffix}", pixels, 0x08)
        write_idx(root / f"{part}-labels-idx1-ubyte{suffix}", np.arange(labels, dtype=np.uint8), 0x08)


def write_cifar(root: Path, records: int = 4) -> np.ndarray:
    raw = np.random.default_rng(1).integers(0, 256, (records, 3073), dtype=np.uint8)
    raw[:, 0] = np.arange(records)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        raw.tofile(root / name)
    return raw


# ------------------------------------------------------------------------------------------------ text


def test_standard_library_holds_enough_prose() -> None:
    from chaos_lightning.examples.datasets import read_text

    train, valid = read_text("stdlib")
    assert len(train) > 300_000
    assert 10_000 < len(valid) < len(train)
    assert b"Python" in train


def test_blocks_cover_the_text_once_and_targets_are_one_byte_ahead() -> None:
    from chaos_lightning.examples.datasets import ByteBlocks

    text = bytes(range(101))
    blocks = ByteBlocks(text, block=10)
    assert len(blocks) == 10
    assert b"".join(bytes(blocks[i][0].tolist()) for i in range(10)) == text[:100]
    assert blocks[9][1].tolist() == list(range(91, 101))
    assert blocks[0][0].dtype == torch.int64


def test_text_shorter_than_a_block_is_refused() -> None:
    from chaos_lightning.examples.datasets import ByteBlocks

    with pytest.raises(ValueError, match=r"8 bytes of text hold no block of 8 \+ 1"):
        ByteBlocks(b"too tiny", block=8)


@pytest.mark.parametrize("ending", ["tokens", "raw"])
def test_wikitext_folder(tmp_path: Path, ending: str) -> None:
    from chaos_lightning.examples.datasets import read_text

    (tmp_path / f"wiki.train.{ending}").write_text(" = Robert = \n\n He is an actor . \n" * 9)
    (tmp_path / f"wiki.valid.{ending}").write_text(" = Homarus = \n")
    train, valid = read_text(str(tmp_path))
    assert train.count(b"actor") == 9
    assert valid == b" = Homarus = \n"


def test_text_file_gives_its_end_for_validation(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import read_text

    (tmp_path / "a.txt").write_bytes(bytes(200))
    train, valid = read_text(str(tmp_path / "a.txt"))
    assert (len(train), len(valid)) == (190, 10)


def test_missing_text_says_what_would_do(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import MissingDataError, read_text

    with pytest.raises(MissingDataError, match=r"wiki\.train\.tokens"):
        read_text(str(tmp_path))


def test_python_documentation_is_found_or_its_package_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos_lightning.examples import datasets

    monkeypatch.setattr(datasets, "PYTHON_DOC", str(tmp_path))
    with pytest.raises(datasets.MissingDataError, match=r"python3\.11-doc"):
        datasets.read_text("python-doc")
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "os.rst.txt").write_text("x" * 40)
    assert [len(part) for part in datasets.read_text("python-doc")] == [38, 2]


# ------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize(("kind", "dtype"), [(0x08, ">u1"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
@pytest.mark.parametrize("name", ["a.gz", "a"])
def test_idx_gives_back_what_was_written(tmp_path: Path, kind: int, dtype: str, name: str) -> None:
    from chaos_lightning.examples.datasets import read_idx

    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    write_idx(tmp_path / name, array, kind)
    read = read_idx(tmp_path / name)
    assert (read == array).all()
    assert read.dtype.isnative


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x89PNG....", "starts with 89504e47"),
        (b"\0\0\x07\1\0\0\0\1x", "no IDX file"),
        (b"\0\0\x08\3\0\0\0\1", "ends inside its header"),
        (b"\0\0\x08\1\0\0\0\5abcd", "needs 13"),
        (b"\0\0\x08\1\0\0\0\3abcd", "needs 11"),
    ],
)
def test_damaged_idx_is_refused_in_words(tmp_path: Path, raw: bytes, message: str) -> None:
    from chaos_lightning.examples.datasets import read_idx

    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "bad")


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_fashion_mnist_of_any_folder(tmp_path: Path, suffix: str) -> None:
    from chaos_lightning.examples.datasets import fashion_mnist

    write_fashion(tmp_path, suffix=suffix)
    train, test = fashion_mnist(tmp_path)
    assert len(train) == len(test) == 5
    image, label = train[3]
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.float32
    assert label.item() == 3


def test_images_without_their_labels_are_refused(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import fashion_mnist

    write_fashion(tmp_path, labels=4)
    with pytest.raises(ValueError, match="5 images but 4 labels in part 'train'"):
        fashion_mnist(tmp_path)


def test_the_installed_fashion_mnist_is_the_whole_of_it() -> None:
    from chaos_lightning.examples.datasets import FASHION_MNIST, fashion_mnist

    if not Path(FASHION_MNIST).is_dir():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    train, test = fashion_mnist()
    assert (len(train), len(test)) == (60_000, 10_000)
    images, labels = train.tensors
    assert torch.bincount(labels).tolist() == [6000] * 10
    assert abs(images.mean().item()) < 0.01
    assert abs(images.std().item() - 1) < 0.01


def test_missing_fashion_mnist_falls_back_only_if_asked(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import ImageData, MissingDataError

    with pytest.raises(MissingDataError, match="dataset-fashion-mnist"):
        ImageData("fashion_mnist", str(tmp_path)).setup("fit")
    data = ImageData("fashion_mnist", str(tmp_path), fallback=True)
    with pytest.warns(UserWarning, match="digits instead"):
        data.setup("fit")
    assert next(iter(data.val_dataloader()))[0].shape == (32, 1, 8, 8)


def test_digits_have_disjoint_parts() -> None:
    from chaos_lightning.examples.datasets import digits

    train, test = digits()
    assert len(train) + len(test) == 1797
    seen = {image.numpy().tobytes() for image, _ in train}
    assert sum(image.numpy().tobytes() in seen for image, _ in test) == 0
    assert sorted(set(train.tensors[1].tolist())) == list(range(10))


def test_cifar10_records(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import ImageData, cifar10

    raw = write_cifar(tmp_path)
    train, test = cifar10(tmp_path)
    assert (len(train), len(test)) == (20, 4)
    image, label = test[2]
    assert label.item() == 2
    pixels = (image * 0.251 + 0.473) * 255
    assert torch.allclose(pixels, torch.from_numpy(raw[2, 1:].reshape(3, 32, 32)).float(), atol=1e-3)
    data = ImageData("cifar10", str(tmp_path), batch_size=4)
    assert next(iter(data.train_dataloader()))[0].shape == (4, 3, 32, 32)


def test_damaged_or_missing_cifar10_is_refused_in_words(tmp_path: Path) -> None:
    from chaos_lightning.examples.datasets import MissingDataError, cifar10

    with pytest.raises(MissingDataError, match="binary version"):
        cifar10(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(3072))
    with pytest.raises(ValueError, match=r"data_batch_3\.bin has 3072 bytes"):
        cifar10(tmp_path)


def test_unknown_images_are_refused() -> None:
    from chaos_lightning.examples.datasets import ImageData

    with pytest.raises(ValueError, match="unknown images 'mnist'"):
        ImageData("mnist")
