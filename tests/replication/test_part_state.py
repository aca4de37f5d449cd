"""Tests the parts of a pipeline's training state: their contents, and how they are served, pulled, verified and kept in
files.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from replication_support import PATIENT, dial, donors
from test_replication_access import OPTIMIZERS, carry
from torch import nn

from chaos_lightning.errors import StateError
from chaos_lightning.pipeline.absent import is_absent
from chaos_lightning.pipeline.building import ModelMemory
from chaos_lightning.protocol.types import GENESIS, NO_VIEW, Header, Kind, ViewId
from chaos_lightning.replication import ModuleState, kept, state_hash
from chaos_lightning.replication.bulk import named_head
from chaos_lightning.replication.part_state import (
    PartCopy,
    PartServer,
    PartState,
    part_hashes,
    part_manifest,
    part_name,
    pull_part,
)

HEADER = Header(3, Kind.STEP, 3, NO_VIEW, "0011223344556677", NO_VIEW)
SEED = 5


class Model(nn.Module):
    """Model of two layers, a weight that both use under different names, and a buffer that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 300)
        self.norm = nn.BatchNorm1d(300)
        self.last = nn.Linear(300, 6)
        self.head = nn.Linear(6, 300)
        self.head.weight = self.first.weight
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x):
        return self.head(self.last(torch.relu(self.norm(self.first(x * self.mask)))))


PARTS = {
    "layer.0": ("first.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    "layer.1": ("last.weight", "last.bias", "head.bias"),
    "shared.first.weight": ("head.weight",),  # by its other name
    "rest": ("mask",),
}
PARTS["layer.0"] += ("norm.num_batches_tracked",)


class Member:
    """Member of a pipeline that owns some parts of a model, with an optimizer of all parameters."""

    def __init__(self, owned=tuple(PARTS), kind: str = "adamw") -> None:
        self.model = Model()
        self.memory = ModelMemory(self.model, SEED, "cpu")
        names = [n for part in owned for n in PARTS[part]]
        self.memory.leave_out([n for n, _ in [*self.model.named_parameters(), *self.model.named_buffers()]])
        self.memory.room([*names, *PARTS["rest"]])
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        extra = {"scheduler": self.scheduler}
        self.rest = ModuleState(self.model, self.optimizer, extra, rest=PARTS["rest"])

    def part(self, name: str) -> PartState:
        return PartState(name, self.model, PARTS[name], [self.optimizer])

    def parts(self, *names: str) -> list[PartState]:
        return [self.part(n) for n in names or [p for p in PARTS if p != "rest"]]


def trained(steps: int = 3, kind: str = "adamw") -> Member:
    """Returns a member that owns all parts, after some training steps."""
    torch.manual_seed(0)
    member = Member((), kind)
    fresh = Model()
    for (_, p), (_, q) in zip(member.model.named_parameters(), fresh.named_parameters(), strict=True):
        p.data = q.data.clone()
    for (_, p), (_, q) in zip(member.model.named_buffers(), fresh.named_buffers(), strict=True):
        p.data = q.data.clone()
    train(member, steps)
    return member


def train(member: Member, steps: int, seed: int = 1) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        member.optimizer.zero_grad()
        member.model(torch.randn(8, 6, generator=draw)).square().mean().backward()
        member.optimizer.step()
        member.scheduler.step()


def whole(member: Member) -> str:
    return json.dumps([part_hashes(member.parts()), state_hash(member.rest.tensors())])


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "lbfgs"])
def test_the_parts_together_are_the_state(kind):
    """A member that has taken over every part separately trains on exactly like the first one."""
    theirs, mine = trained(kind=kind), Member(kind=kind)
    for a, b in zip(theirs.parts(), mine.parts(), strict=True):
        carry(a, b)
    carry(theirs.rest, mine.rest)
    train(theirs, 3, seed=9)
    train(mine, 3, seed=9)
    assert whole(mine) == whole(theirs)
    assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    assert mine.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"]


def test_each_tensor_is_of_one_part_and_tied_ones_have_their_first_name():
    member = trained()
    found = [n for p in member.parts() for n, _ in p.tensors()]
    assert len(set(found)) == len(found)
    tensors = {id(t) for p in member.parts() for _, t in p.tensors()}
    kept_by_optimizer = {id(t) for s in member.optimizer.state.values() for t in s.values()}
    assert tensors == {id(p) for p in member.model.parameters()} | kept_by_optimizer | {
        id(b) for n, b in member.model.named_buffers() if n != "mask"
    }
    assert [n for n, _ in member.part("shared.first.weight").tensors()] == [
        "param.first.weight", *(f"optim0.first.weight.{k}" for k in ("exp_avg", "exp_avg_sq", "step"))
    ]  # fmt: skip
    assert member.part("layer.0").volatile() == [f"buffer.{n}" for n in PARTS["layer.0"][3:]]
    assert member.part("layer.1").volatile() == []
    assert [n for n, _ in member.rest.tensors()] == ["buffer.mask"]


def test_a_part_is_pulled_from_those_that_have_it_and_others_stay():
    """One part is pulled while the donor's buffers change; it arrives as it was at the header, and other parts stay as
    they are.
    """
    theirs = trained()
    mine = Member(("layer.1",))
    carry(theirs.part("layer.1"), mine.part("layer.1"))
    before = part_hashes(mine.parts("layer.1"))
    with donors("a", "b") as started:
        servers = [PartServer(d.server) for d in started]
        for server in servers:
            server.hold(HEADER, theirs.parts("layer.0", "layer.1"))
        wanted = part_hashes(theirs.parts())
        theirs.model.norm.running_mean.add_(1.0)
        mine.memory.room(PARTS["layer.0"])
        report = pull_part([d.endpoint for d in started], dial, HEADER, mine.part("layer.0"), config=PATIENT)
    assert report.state_hash == wanted["layer.0"]
    assert part_hashes(mine.parts("layer.0", "layer.1")) == {"layer.0": wanted["layer.0"], **before}
    assert is_absent(mine.model.first.weight)
    assert set(mine.optimizer.state) == {p for n, p in mine.model.named_parameters() if n != "first.weight"}


def test_only_pieces_that_differ_are_sent():
    """After one weight of a part drifted, pulling that part sends only the piece that differs."""
    theirs, mine = trained(), Member()
    for a, b in zip(theirs.parts(), mine.parts(), strict=True):
        carry(a, b)
    mine.model.last.weight.data[3, 7] += 1e-6
    assert part_hashes(mine.parts())["layer.0"] == part_hashes(theirs.parts())["layer.0"]
    assert part_hashes(mine.parts())["layer.1"] != part_hashes(theirs.parts())["layer.1"]
    with donors("a") as started:
        PartServer(started[0].server).hold(HEADER, theirs.parts("layer.1"))
        report = pull_part([started[0].endpoint], dial, HEADER, mine.part("layer.1"), config=PATIENT)
    assert sum(report.by_source.values()) == mine.model.last.weight.nbytes
    assert part_hashes(mine.parts()) == part_hashes(theirs.parts())


def test_parts_are_served_at_one_header_until_they_are_dropped():
    theirs, mine = trained(), Member()
    later = replace(HEADER, seq=4, step=4)
    with donors("a") as started:
        server = PartServer(started[0].server)
        server.hold(HEADER, theirs.parts("layer.1"))
        server.hold(later, theirs.parts("layer.0"))  # in place of the others
        with pytest.raises(StateError, match="not served here any more"):
            pull_part([started[0].endpoint], dial, HEADER, mine.part("layer.1"), config=PATIENT)
        pull_part([started[0].endpoint], dial, later, mine.part("layer.0"), config=PATIENT)
        server.drop()
        with pytest.raises(StateError, match="not served here any more"):
            pull_part([started[0].endpoint], dial, later, mine.part("layer.0"), config=PATIENT)


def test_who_lacks_a_part_at_the_header_says_so_at_once():
    theirs, mine = trained(), Member()
    with donors("a", "b") as started:
        PartServer(started[0].server).hold(HEADER, theirs.parts("layer.1"))
        PartServer(started[1].server).hold(HEADER, theirs.parts("layer.0"), lacking=["layer.1"])
        with pytest.raises(StateError, match="not served here any more"):
            pull_part([started[1].endpoint], dial, HEADER, mine.part("layer.1"), config=PATIENT)
        report = pull_part([d.endpoint for d in started], dial, HEADER, mine.part("layer.1"), config=PATIENT)
    assert report.by_source.keys() == {"a"}


def test_a_name_tells_header_part_and_at_genesis_the_view():
    names = {
        part_name(HEADER, "layer.1"),
        part_name(HEADER, "layer.11"),
        part_name(replace(HEADER, seq=4), "layer.1"),
        part_name(GENESIS, "layer.1", ViewId(1, 1)),
        part_name(GENESIS, "layer.1", ViewId(1, 2)),
    }
    assert len({named_head(n) for n in names}) == 5
    with pytest.raises(AssertionError):
        part_name(GENESIS, "layer.1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["optimizers"].append(m["optimizers"][0]), "2 optimizers, this member 1"),
        (lambda m: m["optimizers"][0].update(kind="SGD"), "optimizer is SGD, this member's is AdamW"),
        (lambda m: m["optimizers"][0]["state"].update(x={"value": 1}), "state for 'x'"),
        (lambda m: m.update(part="layer.1"), "part 'layer.1'.*expected 'layer.0'"),
    ],
)
def test_what_does_not_fit_is_named(change, words):
    theirs, mine = trained(), Member()
    manifest = theirs.part("layer.0").manifest()
    change(manifest)
    with pytest.raises(StateError, match=words):
        mine.part("layer.0").adopt(manifest)


def test_a_part_that_went_to_another_member_leaves_nothing_behind():
    member = trained()
    before = part_hashes(member.parts("layer.1", "shared.first.weight"))
    member.part("layer.0").forget()
    member.memory.leave_out(PARTS["layer.0"])
    assert {n for n, p in member.model.named_parameters() if p in member.optimizer.state} == {
        "first.weight", "last.weight", "last.bias", "head.bias"
    }  # fmt: skip
    assert part_hashes(member.parts("layer.1", "shared.first.weight")) == before
    with pytest.raises(StateError, match="freed"):
        member.memory.own(PARTS["layer.0"])


def test_the_rest_has_no_copies_of_the_model():
    """An averaged copy of the model is refused in a pipeline, because each member has only some layers."""
    with pytest.raises(StateError, match="'ema' is a copy of the model"):
        ModuleState(Model(), (), {"ema": Model()}, rest=PARTS["rest"])


# ------------------------------------------------------------------------------------------------ files


def test_parts_are_kept_beside_the_rest_and_loaded_one_by_one(tmp_path):
    theirs, mine = trained(), Member(("layer.1",))
    parts = {p.part: p for p in theirs.parts("layer.0", "layer.1")}
    kept.write(tmp_path / "x", HEADER.hash, HEADER.seq, theirs.rest, {"job": "j"}, parts)
    record = kept.read(tmp_path / "x")
    assert record.said == {"job": "j"}
    assert {name: part.state_hash for name, part in record.parts.items()} == part_hashes(parts.values())
    kept.load(record, mine.rest)
    kept.load(record.parts["layer.1"], mine.part("layer.1"))
    assert part_hashes(mine.parts("layer.1")) == part_hashes(theirs.parts("layer.1"))
    assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    kept.remove(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_newer_state_takes_the_place_of_the_parts_of_the_older_one(tmp_path):
    theirs = trained()
    kept.write(tmp_path, HEADER.hash, 3, theirs.rest, {}, {p.part: p for p in theirs.parts()})
    train(theirs, 1)
    later = replace(HEADER, seq=4, step=4)
    kept.write(tmp_path, later.hash, 4, theirs.rest, {}, {p.part: p for p in theirs.parts("layer.0")})
    record = kept.read(tmp_path)
    assert {n: p.state_hash for n, p in record.parts.items()} == part_hashes(theirs.parts("layer.0"))
    assert len(list(tmp_path.glob("part-*"))) == 1
    kept.write(tmp_path, later.hash, 4, theirs.rest, {})
    assert not kept.read(tmp_path).parts
    assert not list(tmp_path.glob("part-*"))


def test_a_writer_that_dies_before_the_record_leaves_the_older_state(tmp_path, monkeypatch):
    theirs = trained()
    kept.write(tmp_path, HEADER.hash, 3, theirs.rest, {"step": 3}, {p.part: p for p in theirs.parts()})
    before = part_hashes(theirs.parts())
    train(theirs, 1)
    replaced = kept._replace

    def dies(path, data):
        if path.parent == tmp_path:
            raise StateError("died")
        replaced(path, data)

    monkeypatch.setattr(kept, "_replace", dies)
    with pytest.raises(StateError, match="died"):
        kept.write(tmp_path, "8877665544332211", 4, theirs.rest, {}, {p.part: p for p in theirs.parts()})
    record = kept.read(tmp_path)
    assert record.said == {"step": 3}
    assert {n: p.state_hash for n, p in record.parts.items()} == before


@pytest.mark.parametrize("harm", ["missing", "other part", "bytes", "no list", "path"])
def test_a_record_whose_parts_are_not_whole_is_no_state(tmp_path, harm):
    theirs = trained()
    record = kept.write(tmp_path, HEADER.hash, 3, theirs.rest, {}, {p.part: p for p in theirs.parts()})
    one, other = record.parts["layer.0"].folder, record.parts["layer.1"].folder
    document = json.loads((tmp_path / kept.RECORD).read_bytes())
    if harm == "missing":
        (one / kept.RECORD).unlink()
    elif harm == "other part":
        (one / kept.RECORD).write_bytes((other / kept.RECORD).read_bytes())
        next(other.glob("*.state")).replace(one / next(one.glob("*.state")).name)
    elif harm == "bytes":
        record.parts["layer.0"].path.write_bytes(b"")
    else:
        document["parts" if harm == "no list" else "head"] = 3 if harm == "no list" else "../../x"
        (tmp_path / kept.RECORD).write_text(json.dumps(document))
    with pytest.raises(StateError):
        kept.read(tmp_path)


def test_a_record_without_parts_is_as_before(tmp_path):
    theirs = trained()
    kept.write(tmp_path, HEADER.hash, 3, theirs.rest, {"job": "j"})
    assert set(json.loads((tmp_path / kept.RECORD).read_bytes())) == {
        "version", "said", "name", "nbytes", "table", "manifest"
    }  # fmt: skip


def test_a_record_with_parts_has_a_version_of_its_own(tmp_path):
    """Records with parts have another version, so that an older release refuses them instead of taking the part `rest`
    for the whole state.
    """
    theirs = trained()
    found = {}
    for name, parts in (("whole", {}), ("parts", {p.part: p for p in theirs.parts("layer.0")})):
        kept.write(tmp_path / name, HEADER.hash, 3, theirs.rest, {}, parts)
        found[name] = json.loads((tmp_path / name / kept.RECORD).read_bytes())
    assert (found["whole"]["version"], found["parts"]["version"]) == (1, 2)
    for name, version in (("whole", 2), ("parts", 1), ("parts", 3)):
        (tmp_path / name / kept.RECORD).write_text(json.dumps({**found[name], "version": version}))
        with pytest.raises(StateError, match=f"has version {version}"):
            kept.read(tmp_path / name)


# ------------------------------------------------------------------------------------------------ copies


def test_a_part_is_read_without_a_model():
    theirs = trained()
    copy = PartCopy("layer.0")
    with donors("a", "b") as started:
        for donor in started:
            PartServer(donor.server).hold(HEADER, theirs.parts("layer.0"))
        ways = [d.endpoint for d in started]
        report = pull_part(ways, dial, HEADER, copy, config=PATIENT)
        assert part_manifest(ways, dial, HEADER, "layer.0", config=PATIENT) == theirs.part("layer.0").manifest()
        started[0].server.hold(part_name(HEADER, "layer.1"), 3, [], theirs.part("layer.0").manifest())
        with pytest.raises(StateError, match=r"part 'layer.0' of the training state; expected 'layer.1'"):
            part_manifest(ways[:1], dial, HEADER, "layer.1", config=PATIENT)
    # Memory that was just free may have some of the bytes already.
    assert sum(report.by_source.values()) + report.skipped == report.nbytes
    assert state_hash(copy.tensors()) == part_hashes(theirs.parts())["layer.0"]


def test_what_has_arrived_of_a_copy_is_not_sent_again():
    theirs = trained()
    copy = PartCopy("layer.1")
    with donors("a") as (donor,):
        PartServer(donor.server).hold(HEADER, theirs.parts("layer.1"))
        pull_part([donor.endpoint], dial, HEADER, copy, config=PATIENT)
        before = {name: t.data_ptr() for name, t in copy.tensors()}
        again = pull_part([donor.endpoint], dial, HEADER, copy, config=PATIENT)
    assert again.by_source == {}
    assert {name: t.data_ptr() for name, t in copy.tensors()} == before


def test_the_first_that_answers_gives_a_manifest():
    theirs = trained()
    with donors("a", "b") as started:
        started[0].server.close()
        PartServer(started[1].server).hold(HEADER, theirs.parts("layer.1"))
        ways = [d.endpoint for d in started]
        assert part_manifest(ways, dial, HEADER, "layer.1", config=PATIENT)["part"] == "layer.1"
        with pytest.raises(StateError, match=r"no donor is left for the manifest of layer.0.*nothing has arrived; a: "):
            part_manifest(ways[:1], dial, HEADER, "layer.0", config=PATIENT)
