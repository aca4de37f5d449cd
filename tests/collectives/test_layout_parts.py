"""Tests layouts by parts: equal at all members, with memory only for the owned parts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from chaos_lightning.collectives.gradients import Gradients, _Stage
from chaos_lightning.collectives.layout import Layout, Section
from chaos_lightning.collectives.memory import Memory
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.spans import count
from chaos_lightning.protocol.types import NO_VIEW, Header, Kind, equal_shares


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Linear(40, 6))


PART_OF = {
    f"{i}.{name}": f"layer.{layer}"
    for i, layer, names in (
        (0, 0, ("weight", "bias")),
        (1, 1, ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        (2, 1, ("weight", "bias")),
        (3, 2, ("weight", "bias")),
    )
    for name in names
}


def layout_of(model: nn.Module, part_of=PART_OF) -> Layout:
    return Layout([Section("all", list(model.named_parameters()))], list(model[1].named_buffers("1")), part_of)


def test_the_layout_is_that_of_the_whole_whatever_has_memory():
    real = layout_of(net())
    with torch.device("meta"):
        bare = layout_of(net())
    assert (bare.hash, bare.nbytes, bare.spans()) == (real.hash, real.nbytes, real.spans())
    assert real.parts() == ("layer.2", "layer.1", "layer.0")
    assert count(real.spans_of(real.parts())) == real.nbytes
    assert all(r.part == s.part for s in real.slots for r in real.runs if r.start <= s.start < r.stop)


def test_the_hash_tells_other_parts_and_shapes_and_is_as_before_without_parts():
    model = net()
    whole = layout_of(model, None)
    assert {run.part for run in whole.runs} == {""}
    assert whole.hash != layout_of(model).hash != layout_of(model, PART_OF | {"2.bias": "layer.2"}).hash
    wider = nn.Sequential(*list(net())[:3], nn.Linear(40, 7))
    assert layout_of(wider).hash != layout_of(model).hash


def test_a_tensor_of_no_part_is_named():
    with pytest.raises(ConfigurationError, match=r"'3\.bias'.*no part"):
        layout_of(net(), {k: v for k, v in PART_OF.items() if k != "3.bias"})


def test_memory_is_for_what_is_owned_and_has_one_result():
    layout = layout_of(net())
    owned = layout.spans_of(["layer.0", "layer.1"])
    memory = Memory(layout, owned=owned)
    assert memory.nbytes == count(owned) < layout.nbytes
    assert memory.own.nbytes == memory.results[0].nbytes == memory.nbytes
    assert memory.results[0] is memory.results[1]
    places = sorted(memory.place(run.start) for run in layout.runs if memory.holds(run.start))
    assert places[0] == 0
    assert all(place % 64 == 0 for place in places)
    for i, slot in enumerate(layout.slots):
        if memory.holds(slot.start):
            memory.view(memory.own, i).fill_(i)
    for i, slot in enumerate(layout.slots):
        if memory.holds(slot.start):
            data = b"".join(memory.pieces(slot.start, slot.stop))
            assert torch.frombuffer(bytearray(data), dtype=slot.dtype).unique().tolist() == [i]
    none = Memory(layout, owned=())
    assert none.nbytes == 0
    assert not any(none.holds(slot.start) for slot in layout.slots)


def test_all_members_have_two_results_where_there_are_no_parts():
    memory = Memory(layout_of(net(), None))
    assert memory.results[0].data_ptr() != memory.results[1].data_ptr()
    assert memory.nbytes == memory.layout.nbytes


class Parts:
    """Gradients of one member of a pipeline; `commit` doubles its own contribution."""

    def __init__(self, owned: list[str], model: nn.Module | None = None) -> None:
        self.model = model or net()
        self.layout = layout_of(self.model)
        self.memory = Memory(self.layout, owned=self.layout.spans_of(owned))
        self.ready: list[int] = []
        self.gradients = Gradients(self.memory, True, self.ready.extend)

    def cells(self, part: str) -> set[int]:
        spans = self.layout.spans_of([part])
        return {a for a, b in self.memory.grid if any(x < b and a < y for x, y in spans)}

    def commit(self, presence: bytes, weight: float, totals) -> None:
        for i, slot in enumerate(self.layout.slots):
            if self.memory.holds(slot.start):
                data = b"".join(self.memory.pieces(slot.start, slot.stop))
                own = torch.frombuffer(bytearray(data), dtype=slot.dtype).view(slot.tensor.shape)
                self.memory.view(self.memory.results[1], i).copy_(2 * own)
        shares = equal_shares([(weight, 1.0)])
        header = Header(1, Kind.STEP, 1, NO_VIEW, "", NO_VIEW, shares=shares, presence=presence)
        self.gradients.apply(header, totals=totals)


def test_a_part_is_launched_in_its_last_backward_pass():
    one = Parts(["layer.0", "layer.1", "layer.2"])
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    expected = net()
    expected.load_state_dict(one.model.state_dict())
    one.gradients.arm(0, 1.0, by_part=True)
    one.model(x).sum().backward()
    assert one.ready == []
    one.gradients.closing(["layer.2"])
    one.model(y).sum().backward()
    assert set(one.ready) == one.cells("layer.2")
    one.gradients.closed(["layer.2"])
    one.gradients.closing(["layer.1", "layer.0"])
    assert set(one.ready) == one.cells("layer.2")
    one.gradients.closed(["layer.1", "layer.0"])  # no pass has reported them: they are settled
    assert set(one.ready) == one.cells("layer.2") | one.cells("layer.0") | (one.cells("layer.1") & set(one.ready))
    presence = one.gradients.flush({"layer.1": 2.0})
    assert sorted(one.ready) == [a for a, _ in one.memory.grid]
    one.commit(presence, 8.0, {"layer.1": 4.0})
    for batch in (x, y):
        expected(batch).sum().backward()
    for (name, p), q in zip(one.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad / 4, msg=name)
    torch.testing.assert_close(one.model[1].running_mean, expected[1].running_mean)
    assert one.model[1].num_batches_tracked.item() == 2


def test_an_accumulation_that_is_dropped_leaves_nothing():
    """After an accumulation is dropped whose gradients were sent, the next one succeeds and has its own sums only."""
    one = Parts(["layer.0", "layer.1", "layer.2"])
    one.model.eval()
    x = torch.randn(4, 6)
    one.gradients.arm(0, 1.0, by_part=True)
    one.gradients.closing(["layer.2", "layer.1"])
    one.model(x).sum().backward()
    one.model.zero_grad()
    one.gradients.arm(0, 1.0, by_part=True)
    one.ready.clear()
    one.gradients.closing(["layer.0", "layer.1", "layer.2"])
    one.model(x).sum().backward()
    wanted = [p.grad.clone() for p in one.model.parameters()]
    one.gradients.closed(["layer.0", "layer.1", "layer.2"])
    one.commit(one.gradients.flush({"layer.1": 1.0}), 2.0, {"layer.1": 2.0})
    for p, want in zip(one.model.parameters(), wanted, strict=True):
        assert torch.equal(p.grad, want)


def test_a_gradient_that_grows_after_its_part_was_sent_is_named():
    one = Parts(["layer.0", "layer.1", "layer.2"])
    x = torch.randn(4, 6)
    one.gradients.arm(0, 1.0, by_part=True)
    one.gradients.closing(["layer.2"])
    one.model(x).sum().backward()
    one.model(x).sum().backward()
    with pytest.raises(ConfigurationError, match=r"'3\.(weight|bias)' received gradients twice"):
        one.gradients.flush({})


def test_what_is_not_owned_keeps_its_gradient_and_has_no_bit():
    one = Parts(["layer.2"])
    one.model(torch.randn(4, 6)).sum().backward()
    foreign = one.model[0].weight.grad
    before = foreign.clone()
    one.gradients.arm(0, 1.0, by_part=True)
    presence = one.gradients.flush({})
    names = [slot.name for i, slot in enumerate(one.layout.slots) if i < 8 and presence[i // 8] >> (i % 8) & 1]
    assert set(names) == {"3.weight", "3.bias"}
    assert set(one.ready) == one.cells("layer.2")
    one.commit(presence, 1.0, {})
    assert one.model[0].weight.grad is foreign
    assert torch.equal(foreign, before)


def test_another_member_owns_the_part_after_a_move():
    one = Parts(["layer.2"])
    x = torch.randn(4, 6)
    one.gradients.lay_out(one.layout.spans_of(["layer.0"]))
    assert one.memory.nbytes == count(one.layout.spans_of(["layer.0"]))
    one.gradients.arm(0, 1.0, by_part=True)
    one.gradients.closing(["layer.0", "layer.2"])
    one.model(x).sum().backward()
    assert set(one.ready) == one.cells("layer.0")
    wanted = one.model[0].weight.grad.clone()
    one.commit(one.gradients.flush({}), 2.0, {})
    assert torch.equal(one.model[0].weight.grad, wanted)


def test_without_parts_a_layout_needs_tensors_that_all_have_memory():
    with pytest.raises(ConfigurationError, match="nowhere; a member trains at least one"):
        Memory(Layout([Section("all", [])]))
    mixed = net()
    mixed[3] = nn.Linear(40, 6, device="meta")
    with pytest.raises(ConfigurationError, match="cpu, meta; a member trains at least one, on one device"):
        Memory(layout_of(mixed, None))
    assert Memory(layout_of(mixed)).layout.device.type == "cpu"


class Event:
    """Stand-in for a device event whose work is finished."""

    def __init__(self, *_: object) -> None:
        self.record = self.synchronize = lambda: None


class Stream(nullcontext):
    def __init__(self, *_: object) -> None:
        super().__init__()

    def wait_event(self, event: Event) -> None:
        pass


@pytest.mark.parametrize("by_part", [True, False])
def test_copies_that_an_attempt_never_made_do_not_reach_the_next_one(monkeypatch, by_part):
    """An attempt ends with a gradient queued but not copied; the copy must not be made in the next attempt, which lacks
    that gradient.
    """
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", Stream)
    one = Parts(["layer.2"])
    one.gradients._stage = _Stage(torch.device("cpu"), one.ready.extend)
    one.gradients.arm(0, 1.0, by_part=True)
    one.gradients.closing(["layer.2"])
    one.model[3].weight.sum().backward()
    assert one.ready == []
    one.model.zero_grad()
    one.gradients.arm(0, 1.0, by_part=by_part)
    one.model[3].bias.sum().backward()
    one.gradients.flush({})
    slots = {slot.name: i for i, slot in enumerate(one.layout.slots)}
    sums = {n: float(one.memory.view(one.memory.own, slots[n]).sum()) for n in ("3.weight", "3.bias")}
    one.gradients.close()
    assert sums == {"3.weight": 0.0, "3.bias": 6.0}
