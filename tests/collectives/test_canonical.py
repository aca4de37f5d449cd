"""Tests canonical texts of hyperparameters and layers: they are equal exactly if the values are."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import math
import types
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from chaos_lightning.collectives import canonical
from chaos_lightning.collectives.canonical import Words, compiled_words, layer_words, run_words


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Size(enum.StrEnum):
    SMALL = "small"


@dataclasses.dataclass(slots=True)
class Slotted:
    width: int = 8
    depth: int = 2


class Settings:
    def __init__(self, margin: float) -> None:
        self.margin = margin
        self._kept = object()


def words(value: Any, name: str = "x", **kwargs: Any) -> dict[str, str]:
    found = Words(**kwargs)
    found.add("hyperparameter", name, value)
    assert not found.formless
    return found.words


def formless(value: Any) -> dict[str, str]:
    found = Words()
    found.add("hyperparameter", "x", value)
    assert not found.words
    return found.formless


LONG = "a long text " * 20
KINDS: list[tuple[Any, Any]] = [
    (1, 2),
    (1, True),
    (1, "1"),
    (2**60, 2**60 + 1),
    (0.1, 0.1000001),
    (math.inf, math.nan),
    (1j, 2j),
    (Fraction(1, 3), Fraction(2, 3)),
    ("org/model", "org/other"),
    ("s3://bucket/a", "s3://bucket/b"),
    ("None", None),
    ("True", True),
    (LONG, LONG + "!"),
    (b"a", b"b"),
    (Color.RED, Color.BLUE),
    ({"a": {"b": 1}}, {"a": {"b": 2}}),
    ({"a": {}}, {"a": {"b": 2}}),
    ({"a": None}, {"a": 0}),
    ({1, 2}, {1, 3}),
    ([1, 2], [2, 1]),
    (["a, b"], ["a", "b"]),
    ([{"a": 1}], [{"a": 2}]),
    ([[1], 2], [1, [2]]),
    (list(range(500)), list(range(501))),
    (np.float32(0.1), np.float32(0.2)),
    (np.arange(3), np.arange(4)),
    (np.zeros(3), np.zeros(3, dtype=np.float32)),
    (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.float16, torch.bfloat16),
    (range(3), range(4)),
    (OmegaConf.create({"a": {"b": [1, 2]}}), OmegaConf.create({"a": {"b": [1, 3]}})),
    (argparse.Namespace(lr=0.1), argparse.Namespace(lr=0.2)),
    (types.SimpleNamespace(lr=0.1), types.SimpleNamespace(lr=0.2)),
    (Slotted(8), Slotted(16)),
    (Settings(0.1), Settings(0.2)),
    (torch.relu, torch.tanh),
    (nn.ReLU, nn.GELU),
    (nn.Dropout(0.1), nn.Dropout(0.2)),
    (np.tanh, np.sinh),
    (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
]


@pytest.mark.parametrize(("one", "other"), KINDS, ids=lambda value: f"{type(value).__name__} {str(value)[:20]}")
def test_values_of_every_kind_are_told_apart(one: Any, other: Any) -> None:
    assert words(one) != words(other)
    assert words(one) == words(one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (0.5, np.float32(0.5)),
        (3, np.int64(3)),
        (True, np.bool_(True)),
        (0.5, torch.tensor(0.5)),
        (10**22, 1e22),
        ([1, (2, 3)], (1, [2, 3])),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        ({"a": {"b": [1, 2]}}, OmegaConf.create({"a": {"b": [1, 2]}})),
        (Size.SMALL, "small"),
        (Settings(0.1), Settings(0.1)),
        (None, "/a/path"),
    ],
)
def test_equal_values_have_equal_words(one: Any, other: Any) -> None:
    assert words(one) == words(other)


def test_a_refusal_can_name_the_value_that_differs() -> None:
    config = OmegaConf.create({"model": {"layers": [{"width": 8}], "lr": 0.1}, "data": {"name": "mnist"}})
    found = Words()
    found.add("hyperparameter", "config", config)
    assert found.words == {
        "hyperparameter config.model.layers": "({'width': 8})",
        "hyperparameter config.model.lr": "0.1",
        "hyperparameter config.data.name": "mnist",
    }


@pytest.mark.parametrize(
    ("name", "value", "compared"),
    [
        ("name", "run-1", True),
        ("model_name", "org/model", True),
        ("drop_path", 0.1, True),
        ("profile", "large", True),
        ("lora_rank", 8, True),
        ("batch_size", 8, False),
        ("train_batch_size", 8, False),
        ("num_workers", 2, False),
        ("local_rank", 1, False),
        ("hostname", "a", False),
        ("data_dir", "data", False),
        ("ckpt_path", "last", False),
        ("roots", ["a", "b"], False),
        ("anything", "/data/a", False),
        ("anything", "./a", False),
        ("anything", "C:\\a", False),
        ("anything", Path("a"), False),
        ("anything", torch.device("cpu"), False),
        ("strategy", {"name": "node-1"}, False),
        ("strategy", "greedy", True),
        ("mine", 3, False),
        ("nested", {"mine": 3}, False),
    ],
)
def test_what_may_differ_between_machines_is_left_out(name: str, value: Any, compared: bool) -> None:
    own = {"mine", "nested.mine"}
    assert bool(words(value, name, own=own)) is compared
    assert bool(words({name: value}, "config", own={*own, f"config.{name}.mine", "config.mine"})) is compared


def test_an_optimizers_defaults_are_no_machines() -> None:
    assert words(8, "rank", of_machines=False)


def loop() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: 0, "a function without a name of its own"),
        ([1, lambda: 0], "a function without a name of its own"),
        (torch.Generator(), "Generator"),
        (object(), "object"),
        (loop(), "a list that holds itself"),
        (torch.empty(2, device="meta"), "a tensor of torch.float32"),
        (OmegaConf.create(["???"]), "it cannot be read"),
    ],
    ids=["lambda", "within", "handle", "object", "cycle", "meta", "unreadable"],
)
def test_what_has_no_canonical_form_is_named(value: Any, why: str) -> None:
    assert why in formless(value)["hyperparameter x"]


def test_a_value_that_a_configuration_lacks_is_named() -> None:
    found = Words()
    found.add("hyperparameter", "config", OmegaConf.create({"a": "???", "b": 1}))
    assert found.words == {"hyperparameter config.b": "1"}
    assert list(found.formless) == ["hyperparameter config.a"]


def test_many_values_are_folded_and_too_many_named(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(n): n for n in range(canonical.NAMED + 9)}
    assert len(words(many)) == canonical.NAMED + 1
    assert words(many) != words({**many, "7": -1})
    assert words(many) != words({**many, "999": -1})
    monkeypatch.setattr(canonical, "_MOST", 10)
    assert formless(list(range(20))) == {"hyperparameter x": "more than 10 values"}


class Scale(nn.Module):
    """Custom layer, as a user might write it."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def extra_repr(self) -> str:
        return f"by={self.by}"


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (Scale(1), Scale(2), "layer net"),
        (nn.Dropout(0.1), nn.Dropout(0.2), "layer net"),
        (nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, stride=2), "layer net"),
        (nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-3), "layer net"),
        (nn.LSTM(4, 4, 2), nn.LSTM(4, 4, 2, dropout=0.5), "layer net"),
        (nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, dropout=0.5), "layer net"),
        (nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 4), "layer net"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_settings_of_layers_that_no_parameter_shows(one: nn.Module, other: nn.Module, name: str) -> None:
    mine, its = (layer_words(nn.ModuleDict({"net": layer})).words for layer in (one, other))
    assert {key for key, _ in {*mine.items()} ^ {*its.items()}} == {name}


def test_layers_that_show_what_they_hold_are_named_once() -> None:
    model = nn.ModuleDict({"a": Scale(object()), "b": Scale(torch.ones(2)), "c": Scale(1)})
    with pytest.warns(
        UserWarning, match=r"layer a \(a Scale that .*layer b \(a Scale that .*chaos_own_hparams"
    ) as told:
        found = run_words(model, {})
    assert len(told) == 1
    assert found == {"layer c": "Scale(by=1)", "compiled": "nothing"}


def test_a_compiled_model_is_told_as_such() -> None:
    plain = nn.ModuleDict({"net": nn.Sequential(nn.Dropout(0.1))})
    compiled = nn.ModuleDict({"net": torch.compile(nn.Sequential(nn.Dropout(0.1)), backend="eager")})
    assert compiled_words(plain) == {"compiled": "nothing"}
    assert compiled_words(compiled) == {"compiled": "net"}
    assert compiled_words(torch.compile(nn.Dropout(), backend="eager")) == {"compiled": "all of it"}  # type: ignore[arg-type]
    assert layer_words(plain).words == layer_words(compiled).words
