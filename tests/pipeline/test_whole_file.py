"""Tests checkpoints of the whole model written by a member that holds only some parts."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from whole_models import OPTIMIZERS, PARTS, FromOwners, Holder, holding, same, trained

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline import whole_file
from chaos_lightning.pipeline.whole_file import AbsentTensor, PartialModel, WholeFile, partial_state_dict, write_whole

PLANS = {"nothing": (), "first": (0,), "middle": (1,), "last": (2,), "ends": (0, 2), "all": (0, 1, 2)}


def written(tmp_path: Path, holder: Holder, source: Any, **more: Any) -> Path:
    path = tmp_path / "whole.ckpt"
    write_whole(path, holder.checkpoint(**more), holder.here, source)
    return path


def records(path: Path) -> dict[str, bytes]:
    """Returns the records of a checkpoint file by name, without the archive's name and the file's own id."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "a checksum is wrong"
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    assert found.pop(".data/serialization_id")
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_the_file_is_that_of_one_process_whatever_is_here(tmp_path: Path, kind: str, plan: str) -> None:
    whole = trained(kind)
    torch.save(whole.checkpoint(), tmp_path / "plain.ckpt")
    member = holding(whole, kind, PLANS[plan])
    path = written(tmp_path, member, source := FromOwners(whole))
    same(torch.load(path, weights_only=True), torch.load(tmp_path / "plain.ckpt", weights_only=True))
    assert source.asked == [part for part in PARTS.users if part not in PARTS.owned_by(PLANS[plan])]
    ours, plain = records(path), records(tmp_path / "plain.ckpt")
    assert ours.keys() == plain.keys()
    assert [name for name in ours if ours[name] != plain[name] and name != "data.pkl"] == []
    state = torch.load(path, weights_only=True, mmap=True)["state_dict"]
    assert state["first.weight"].data_ptr() == state["last.weight"].data_ptr(), "tied weights are written once"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_another_process_goes_on_from_it_as_from_a_plain_one(tmp_path: Path, kind: str) -> None:
    from whole_models import train

    whole = trained(kind)
    path = written(tmp_path, holding(whole, kind, (1,)), FromOwners(whole))
    again, saved = trained(kind, steps=0), torch.load(path, weights_only=True)
    again.model.load_state_dict(saved["state_dict"])
    again.optimizer.load_state_dict(saved["optimizer_states"][0])
    train(whole, 2, seed=9)
    train(again, 2, seed=9)
    same(again.model.state_dict(), whole.model.state_dict())


def test_only_parts_that_are_in_the_checkpoint_are_asked_for(tmp_path: Path) -> None:
    """For a checkpoint with only some of the weights and no optimizer states, only the parts in it are read from other
    members.
    """
    whole = trained()
    member = holding(whole, "adamw", (2,))
    checkpoint = member.checkpoint()
    del checkpoint["optimizer_states"]
    for name in [n for n in checkpoint["state_dict"] if n.startswith(("first", "norm", "last"))]:
        del checkpoint["state_dict"][name]
    source = FromOwners(whole)
    source.manifest = None  # type: ignore[assignment]
    write_whole(tmp_path / "x", checkpoint, member.here, source)
    assert source.asked == ["layer.1"]
    saved = torch.load(tmp_path / "x", weights_only=True)
    assert list(saved["state_dict"]) == ["frozen", "mask", "flags", "empty", "middle.weight", "middle.bias"]
    assert torch.equal(saved["state_dict"]["middle.weight"], whole.model.middle.weight)


def test_absent_tensors_may_be_taken_along_by_any_name(tmp_path: Path) -> None:
    """Absent tensors are written with their values even inside the user's own dicts, lists and modules; a user's tensor
    of two elements is not mistaken for one.
    """
    whole = trained()
    member = holding(whole, "adamw", ())
    state = partial_state_dict(member.model)
    more = {
        "mine": [OrderedDict((k, v.detach().cpu()) for k, v in state.items() if k.startswith("norm"))],
        "parameter": member.model.norm.weight,
        "module": member.model.norm,
        "pair": torch.tensor([3.0, 4.0])[1],
    }
    write_whole(tmp_path / "x", more, member.here, FromOwners(whole))
    saved = torch.load(tmp_path / "x", weights_only=False)
    assert torch.equal(saved["mine"][0]["norm.running_mean"], whole.model.norm.running_mean)
    assert isinstance(saved["parameter"], nn.Parameter)
    same(saved["module"].state_dict(), whole.model.norm.state_dict())
    assert saved["pair"] == 4.0


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.half(),
        lambda t: t.clone(),
        lambda t: t.sum().item(),
        lambda t: t + 1,
        lambda t: t[0],
        lambda t: t.t(),
        lambda t: t.numpy(),
        lambda t: torch.save(t, os.devnull),
        lambda t: bool((t > 0).all()),
    ],
)
def test_values_that_are_elsewhere_are_not_used(use: Any) -> None:
    """Using the values of an absent tensor, for example in `on_save_checkpoint`, raises an error."""
    member = holding(trained(), "adamw", (0,))
    absent = partial_state_dict(member.model)["middle.weight"]
    assert isinstance(absent, AbsentTensor)
    assert (absent.shape, absent.dtype, absent.numel()) == ((6, 30), torch.bfloat16, 180)
    assert absent.device == torch.device("cpu")
    assert repr(absent) == "<torch.bfloat16[6, 30] at other members>"
    assert absent.detach().detach() is absent
    with pytest.raises(StateError, match="its values are at other members"):
        use(absent)


def test_a_view_of_what_is_elsewhere_is_no_tensor_of_a_checkpoint(tmp_path: Path) -> None:
    whole = trained()
    member = holding(whole, "adamw", (0,))
    with pytest.raises(StateError, match=r"something made of 'middle.weight'"):
        write_whole(tmp_path / "x", {"x": member.model.middle.weight.detach()[0]}, member.here, FromOwners(whole))


def test_a_state_dict_of_the_users_own_uses_no_values_that_are_elsewhere() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(2, 2), nn.Linear(3, 3)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value.half() for name, value in super().state_dict(*args, **kwargs).items()}

    from chaos_lightning.pipeline.building import ModelMemory

    model = Halved()
    assert partial_state_dict(model)["there.weight"].dtype == torch.float16
    ModelMemory(model, 1, "cpu").leave_out(["there.weight"])
    with pytest.raises(StateError, match=r"calls half\(\) on 'there.weight'"):
        partial_state_dict(model)


# ------------------------------------------------------------------------------------------------ what does not fit


class Changed(FromOwners):
    """Source of parts whose owner changes a part's description or its tensors."""

    def __init__(self, whole: Holder, manifest: Any = None, tensors: Any = None) -> None:
        super().__init__(whole)
        self._manifest, self._tensors = manifest or (lambda m: None), tensors or (lambda named: named)

    def manifest(self, part: str) -> Any:
        found = dict(super().manifest(part))
        self._manifest(found)
        return found

    def tensors(self, part: str) -> list[tuple[str, Tensor]]:
        return self._tensors(super().tensors(part))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("manifest", "tensors", "words"),
    [
        (lambda m: m["optimizers"].append(m["optimizers"][0]), None, r"the optimizers \['AdamW', 'AdamW'\]"),
        (lambda m: m["optimizers"][0].update(kind="SGD"), None, r"the optimizers \['SGD'\], this member"),
        (lambda m: m["optimizers"][0]["state"].update(x={"value": 1}), None, "state for 'x', which is not"),
        (None, lambda named: named[1:], r"did not come from its owner"),
        (None, lambda named: [(n, t.double()) for n, t in named], r"came as torch.float64.* expected torch"),
        (None, lambda named: [(n, t.reshape(-1, 1)) for n, t in named], r"came as .*, 1\], expected"),
    ],
)
def test_parts_that_do_not_fit_end_the_file(tmp_path: Path, manifest: Any, tensors: Any, words: str) -> None:
    whole = trained()
    with pytest.raises(StateError, match=words):
        written(tmp_path, holding(whole, "adamw", (0,)), Changed(whole, manifest, tensors))


def test_an_optimizer_whose_state_has_another_form_is_refused(tmp_path: Path) -> None:
    whole = trained()
    member = holding(whole, "adamw", (0,))
    with pytest.raises(StateError, match=r"AdamW.state_dict\(\) has a form of its own"):
        write_whole(tmp_path / "x", {"optimizer_states": [{"shards": []}]}, member.here, FromOwners(whole))


def test_a_tensor_that_is_of_no_part_is_named(tmp_path: Path) -> None:
    from dataclasses import replace

    whole = trained()
    member = holding(whole, "adamw", (0,))
    less = replace(PARTS, part_of={n: p for n, p in PARTS.part_of.items() if n != "frozen"})
    with pytest.raises(StateError, match=r"'frozen' is absent here and of no part"):
        PartialModel(member.model, less, [member.optimizer]).lacking()


# ------------------------------------------------------------------------------------------------ room


def test_a_file_that_has_no_room_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained()
    full = SimpleNamespace(f_bavail=3, f_frsize=512)
    monkeypatch.setattr(whole_file.os, "fstatvfs", lambda fd: full)
    with pytest.raises(OSError, match="No space left") as got:
        written(tmp_path, holding(whole, "adamw", ()), source := FromOwners(whole))
    assert got.value.errno == errno.ENOSPC
    assert source.asked == []


def test_the_size_of_the_file_is_known_before(tmp_path: Path) -> None:
    whole = trained()
    member = holding(whole, "adamw", (1,))
    laid_out = WholeFile(member.checkpoint(), member.here, source := FromOwners(whole))
    assert source.asked == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (laid_out.nbytes - 1, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            laid_out.write(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    laid_out.write(tmp_path / "x")
    assert (tmp_path / "x").stat().st_size == laid_out.nbytes


class Watched(FromOwners):
    """Source of parts that, when asked for a part, checks that the tensors it returned for the previous part have been
    freed.
    """

    def tensors(self, part: str) -> list[tuple[str, Tensor]]:
        assert [ref for ref in self.given if ref() is not None] == []
        found = super().tensors(part)
        self.given = [weakref.ref(t) for _, t in found]
        return found

    given: list[Any] = []  # noqa: RUF012


def test_nothing_of_a_part_stays_when_the_next_one_comes(tmp_path: Path) -> None:
    whole = trained()
    written(tmp_path, holding(whole, "adamw", ()), source := Watched(whole))
    assert len(source.asked) == 4


MEMORY = """
import resource, sys, torch
from torch import nn
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.pipeline.loaded import LoadedParts, read_whole
from chaos_lightning.pipeline.parts import ModelParts
from chaos_lightning.pipeline.whole_file import PartialModel, partial_state_dict, write_whole
from pathlib import Path

WIDTH, LAYERS, path = 1448, 16, Path(sys.argv[1])  # a layer has 8 MiB, with Adam's state 24
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
memory = ModelMemory(model, 1, "cpu")
parts = ModelParts(LAYERS, {f"{i}.weight": f"layer.{i}" for i in range(LAYERS)},
                   {f"layer.{i}": (i,) for i in range(LAYERS)} | {"rest": tuple(range(LAYERS))})
optimizer = torch.optim.AdamW(model.parameters())
memory.room(["3.weight"])
nn.init.constant_(model[3].weight, 3.0)
model[3].weight.grad = torch.zeros_like(model[3].weight)
optimizer.step()

class Source:
    def manifest(self, part):
        leaf = lambda kind, shape, place: {"tensor": [kind, shape, place]}
        full = [WIDTH, WIDTH]
        tree = {"dict": [("step", leaf("float32", [], "host")), ("exp_avg", leaf("float32", full, "param")),
                         ("exp_avg_sq", leaf("float32", full, "param"))]}
        return {"part": part, "optimizers": [{"kind": "AdamW", "state": {f"{part[6:]}.weight": tree}}]}

    def tensors(self, part):
        value, name = float(part[6:]), f"optim0.{part[6:]}.weight"
        return [(f"param.{part[6:]}.weight", torch.full((WIDTH, WIDTH), value)), (f"{name}.step", torch.tensor(value)),
                *[(f"{name}.{key}", torch.full((WIDTH, WIDTH), value)) for key in ("exp_avg", "exp_avg_sq")]]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

layer = 4 * WIDTH * WIDTH
write_whole(path.with_suffix(".warm"), {"x": torch.zeros(3), "y": model[3].weight.detach()}, PartialModel(model, parts),
            Source())
before = peak()
given = {"state_dict": partial_state_dict(model), "optimizer_states": [optimizer.state_dict()]}
write_whole(path, given, PartialModel(model, parts, [optimizer]), Source())
print("write", (peak() - before) / layer)

memory.leave_out(["3.weight"])
optimizer.state.clear()
torch.load(path.with_suffix(".warm"), weights_only=True, mmap=True)
before = peak()
loaded = LoadedParts(model)
found = read_whole(path, weights_only=True)
loaded.load_model(found["state_dict"], strict=True)
loaded.load_optimizers([optimizer], found["optimizer_states"])
memory.room(["5.weight"])
assert not loaded.fill(["5.weight"])
print("read", (peak() - before) / layer)
assert bool((model[5].weight == 5.0).all()) and bool((optimizer.state[model[5].weight]["exp_avg"] == 5.0).all())
assert len(optimizer.state) == 1
"""


@pytest.mark.slow
def test_one_part_of_the_others_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Writing and reading need less memory than 10 tensors of the whole model's 48: only one part of others at
    a time.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "x")], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    grown = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert grown["write"] < 10.0, grown
    assert grown["read"] < 10.0, grown
    assert (tmp_path / "x").stat().st_size > 48 * 4 * 1448**2
