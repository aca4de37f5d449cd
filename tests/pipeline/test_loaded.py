"""Tests that a member loads its parts from a checkpoint of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from whole_models import OPTIMIZERS, PARTS, Holder, holding, same, train, trained, values_of

from chaos_lightning.pipeline.absent import is_absent, named_tensors
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.loaded import LoadedParts, read_whole

OWNED = {"nothing": (), "first": (0,), "middle": (1,), "all": (0, 1, 2)}


def saved(tmp_path: Path, whole: Holder) -> dict[str, Any]:
    torch.save(whole.checkpoint(), tmp_path / "plain.ckpt")
    found = read_whole(tmp_path / "plain.ckpt")
    assert found is not None
    return found


def names_of(layers: Any) -> list[str]:
    return [name for part in PARTS.owned_by(layers) for name in PARTS.names(part)]


def load(member: Holder, found: dict[str, Any]) -> LoadedParts:
    loaded = LoadedParts(member.model)
    loaded.load_model(found["state_dict"], strict=True)
    loaded.load_optimizers([member.optimizer], found["optimizer_states"])
    return loaded


def check(member: Holder, whole: Holder, layers: Any) -> None:
    """Checks that a member has the values of `whole` in the given layers, and memory for no other tensor."""
    wanted, names = values_of(whole.model), names_of(layers)
    for name, _, _, tensor in named_tensors(member.model):
        assert is_absent(tensor) == (name not in names), name
        if name in names and name != "scratch":  # not persistent, so it is in no checkpoint
            assert torch.equal(tensor, wanted[name]), name
    theirs = dict(whole.model.named_parameters())
    kept = {n for n, p in member.model.named_parameters() if p in member.optimizer.state}
    assert kept == {n for n, p in theirs.items() if p in whole.optimizer.state and n in names}
    for name, p in member.model.named_parameters():
        if name in kept:
            same(dict(member.optimizer.state[p]), dict(whole.optimizer.state[theirs[name]]), name)
    assert [g["lr"] for g in member.optimizer.param_groups] == [g["lr"] for g in whole.optimizer.param_groups]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("owned", OWNED)
def test_a_member_takes_what_it_owns(tmp_path: Path, kind: str, owned: str) -> None:
    whole = trained(kind)
    whole.optimizer.param_groups[0]["lr"] = 0.123
    found = saved(tmp_path, whole)
    member = holding(trained(kind, steps=1), kind, OWNED[owned])
    load(member, found)
    check(member, whole, OWNED[owned])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parts_get_their_values_when_they_get_memory(tmp_path: Path, kind: str) -> None:
    """Parts that get memory after the checkpoint was loaded are filled from it; parts that had memory before keep later
    changes.
    """
    whole = trained(kind)
    member = holding(trained(kind, steps=1), kind, (1,))
    loaded = load(member, saved(tmp_path, whole))
    member.optimizer.param_groups[1]["lr"] = 0.5  # as a hook of the user's may
    with torch.no_grad():
        member.model.middle.bias.add_(1)
    kept = values_of(member.model)["middle.bias"]
    ModelMemory(member.model, 1, "cpu").room([n for p in ("layer.0", "shared.first.weight") for n in PARTS.names(p)])
    left = loaded.fill([n for part in ("layer.0", "shared.first.weight") for n in PARTS.names(part)])
    assert left == {"scratch"}
    assert member.optimizer.param_groups[1]["lr"] == 0.5
    assert torch.equal(member.model.middle.bias, kept)
    member.optimizer.param_groups[1]["lr"] = whole.optimizer.param_groups[1]["lr"]
    with torch.no_grad():
        member.model.middle.bias.sub_(1)
        member.model.middle.bias.copy_(whole.model.middle.bias)
    check(member, whole, (0, 1))
    loaded.forget()
    assert loaded.fill(["last.bias"]) == {"last.bias"}


def test_a_member_that_owns_all_trains_on_as_one_process(tmp_path: Path) -> None:
    whole = trained()
    found = saved(tmp_path, whole)
    member = holding(trained(steps=1), "adamw", (0, 1, 2))
    load(member, found)
    train(whole, 3, seed=9)
    train(member, 3, seed=9)
    same(member.model.state_dict(), whole.model.state_dict())
    same(torch.load(tmp_path / "plain.ckpt"), found)  # nothing of it was written to


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("layers", [(0,), ()])
def test_keys_and_shapes_are_reported_as_torch_reports_them(strict: bool, layers: Any) -> None:
    """Missing keys and wrong shapes are reported exactly as torch reports them, also for parts at other members."""
    whole = trained()
    state = whole.model.state_dict()
    state["middle.extra"] = state.pop("middle.bias")
    del state["norm.running_var"]
    said = []
    for model in (whole.model, holding(whole, "adamw", layers).model):
        for given in (state, {**state, "last.bias": torch.zeros(31), "middle.weight": torch.zeros(6)}):
            try:
                LoadedParts(model).load_model(given, strict=strict)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    assert said[:2] == said[2:]
    assert bool(said[0]) == strict
    assert "size mismatch for middle.weight" in said[1]
    if strict:
        assert "Missing key" in said[0]
        assert "Unexpected key" in said[0]


def test_an_optimizer_that_does_not_fit_is_reported_as_torch_reports_it(tmp_path: Path) -> None:
    found = saved(tmp_path, trained())
    member = holding(trained(), "adamw", (0,))
    groups = found["optimizer_states"][0]["param_groups"]
    groups[0]["params"] = groups[0]["params"][1:]
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        LoadedParts(member.model).load_optimizers([member.optimizer], found["optimizer_states"])


def test_a_model_that_loads_in_its_own_way_does_so_here(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({k.removeprefix("old."): v for k, v in state_dict.items()}, *args, **kwargs)

    whole, member = Renamed(), Renamed()
    ModelMemory(member, 1, "cpu").leave_out(["two.weight", "two.bias"])
    loaded = LoadedParts(member)
    loaded.load_model({f"old.{k}": v for k, v in whole.state_dict().items()}, strict=True)
    assert torch.equal(member.one.weight, whole.one.weight)
    assert is_absent(member.two.weight)
    ModelMemory(member, 1, "cpu").room(["two.weight", "two.bias"])
    assert not loaded.fill(["two.weight", "two.bias"])
    same(member.state_dict(), whole.state_dict())


def test_files_of_another_form_are_not_mapped(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert read_whole(tmp_path / "old") is None


def test_weights_only_holds_for_a_mapped_file(tmp_path: Path) -> None:
    import pickle

    torch.save({"x": Holder}, tmp_path / "x")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        read_whole(tmp_path / "x")
    found = read_whole(tmp_path / "x", weights_only=False)
    assert found is not None
    assert found["x"] is Holder
