"""A cluster's session in the test's process, with leader and follower in real processes; the test decides when each
event happens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from outer_cluster_support import EACH, Cluster, Clusters
from outer_job_support import inner_step, small_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from until_support import until

from chaos_lightning.diloco import DiLoCo
from chaos_lightning.errors import ConfigurationError, DeadlineError, SchedulerUnreachableError, StateError
from chaos_lightning.events.reader import Record
from chaos_lightning.outer.cluster import attendant, leaving, push_serving
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.cluster.session import OuterSession
from chaos_lightning.outer.exchange.codec import Part
from chaos_lightning.outer.exchange.fetching import hold_push
from chaos_lightning.outer.rules.cluster import ClusterMachine
from chaos_lightning.outer.rules.effects import Told
from chaos_lightning.outer.rules.messages import Granted, Holder, Holders
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.outer.rules.types import NO_VERSION, Covered, PushId
from chaos_lightning.replication.server import StateServer
from chaos_lightning.strategies.outer_ranks import RankedSession, RankGroup


class RanksDouble(RankGroup):
    """Stand-in for a group of ranks, at rank 0, in which sending a version to the others takes a while."""

    def __init__(self) -> None:
        self.rank, self.shared = 0, 0

    def tell(self, make: Callable[[], Any]) -> Any:
        return make()

    def sum(self, *numbers: int) -> list[int]:
        return list(numbers)

    def share(self, tensors: Sequence[torch.Tensor]) -> None:  # type: ignore[override]
        self.shared += 1
        threading.Event().wait(0.2)


def told_of(clusters: Clusters, name: str) -> list[Record]:
    """Returns the events of this name in the logs so far."""
    return [record for record in clusters.harness.records if record.name == name]


def test_a_version_that_comes_while_the_one_before_is_about_to_be_adopted(clusters: Clusters) -> None:
    """Former bug: if a newer version arrived just before the fetched one was adopted, training ended with an
    AssertionError. Now the newer one waits.
    """
    fast, slow = clusters.come_in("fast", codec="int8"), clusters.come_in("slow", codec="int8")
    machine = slow.session._life.machine
    slow.train()
    own = machine.newest
    until(lambda: machine._here == own, "the version of its push")
    fast.train()
    until(lambda: machine._served > own, "the next version to be served")
    assert machine.fetching == NO_VERSION
    assert slow.session.boundary(0, steps=0).adopted == own
    slow.settle()
    assert machine.base == machine.newest > own


def test_who_is_through_long_before_the_others_leaves(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Former bug: a plain training loop that had finished before the other clusters waited for them for ever, without a
    word.
    """
    monkeypatch.setattr(leaving, "TELL_S", 0.2)
    clusters.come_in("first")
    second = clusters.come_in("second", patience_s=0.5)
    second.train()
    second.session.finish("its rounds are over")
    assert "asked to leave" in second.session.over
    assert "cluster second waits for the end of the job: other clusters train" in caplog.text
    assert "cluster second waited 0.5 s for the end of the job" in caplog.text
    clusters.harness.wait_for("entry", lambda r: r["kind"] == "Removed")


@pytest.mark.parametrize("when", ["a push is made", "there are other followers"])
def test_training_goes_on_while_pushes_are_hashed(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Former bug: pushes were hashed under the lock that each boundary takes, so that training stopped during the
    hashing.
    """
    began, go_on, waits = threading.Event(), threading.Event(), list[bool]()

    def hold(*given: Any) -> str:
        began.set()
        waits.append(go_on.wait(10))
        return hold_push(*given)

    home = clusters.come_in("home")
    if when == "a push is made":
        monkeypatch.setattr(push_serving, "hold_push", hold)
        inner_step(home.model, home.optimizer, "home", 1)
        home.session.boundary(16)
    else:
        home.train()
        monkeypatch.setattr(push_serving, "hold_push", hold)
        life = home.session._life
        home.session._feed(
            life, Told(Holders(life.machine.term, (*home.session._exchange.holders, Holder("more", ""))))
        )
    until(began.is_set, "the hashing")
    home.session.boundary(0, steps=0)
    assert not waits
    go_on.set()
    until(lambda: waits, "its end")
    assert all(waits)


def test_a_push_that_is_freed_while_it_is_hashed_is_not_served(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = clusters.come_in("home")
    home.train()
    serving = home.session._exchange._serving
    push = max(serving._cuts)

    def hold(server: StateServer, *given: Any) -> str:
        serving.drop(push)
        return hold_push(server, *given)

    monkeypatch.setattr(push_serving, "hold_push", hold)
    served = len(serving._server._versions)
    part = home.session._model.pushes[push]
    serving.drop(push)
    assert len(serving._server._versions) == served - 1
    serving.serve({push: part})
    assert len(serving._server._versions) == served - 1


@pytest.mark.parametrize("kind", ["one process", "elastic"])
def test_a_push_that_is_encoded_while_its_incarnation_is_dismissed_goes_nowhere(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The leader hears nothing of it, and removes it; its stream stands. Until then it encodes."""
    began, go_on, rules = threading.Event(), threading.Event(), replace(EACH, heartbeat_s=0.3)
    home = clusters.come_in("home", rules=rules) if kind == "one process" else clusters.elastic("home", rules)
    part = home.session if isinstance(home, Cluster) else home.cluster
    model, exchange, encoder = part._model, part._exchange, part._model.encoder

    def held() -> Callable[[], Part]:
        encode = encoder()

        def wait() -> Part:
            began.set()
            assert go_on.wait(30.0)
            return encode()

        return wait

    def machine() -> ClusterMachine:
        return part._life.machine if isinstance(part, OuterSession) else part.machine

    def rest() -> None:
        part.boundary(0, steps=0) if isinstance(part, OuterSession) else part.alone()

    def settle() -> None:
        until(lambda: rest() or (machine().base == machine().newest != NO_VERSION), "the newest version")

    settle()
    clusters.come_in("other", rules=rules).settle()  # else it would be the last that has the version
    monkeypatch.setattr(model, "encoder", held)
    if isinstance(home, Cluster):
        home.step()
        home.session.boundary(16)
    else:
        home.train()
    assert began.wait(30.0)
    first, push = machine().incarnation, machine().freezing
    assert push is not None
    attendant = part._life.attendant if isinstance(part, OuterSession) else part._attendant
    assert attendant is not None
    monkeypatch.setattr(attendant._client, "say", lambda message: None)
    until(lambda: rest() or machine().incarnation not in (None, first), "its next incarnation")
    go_on.set()
    exchange._worker.submit(lambda: None).result(30.0)
    assert push not in model.pushes
    assert push not in exchange._serving._cuts
    settle()
    home.train()
    clusters.harness.wait_for("push_frozen", lambda r: not r["push"].startswith(str(first)))
    assert not [r for r in told_of(clusters, "push_frozen") if r["push"] == str(push)]


def test_the_log_has_all_that_training_waited_for(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: a cluster's log left out the time of boundaries that freeze, and the time for sending a version to
    other ranks.
    """
    copies, home = threading.Event(), clusters.come_in("home")
    session, freeze = home.session, home.session._model.freeze

    def slowly(push: PushId) -> None:
        copies.wait(0.2)
        freeze(push)

    monkeypatch.setattr(session._model, "freeze", slowly)
    founded = len(told_of(clusters, "version_adopted"))
    waited = list[float]()
    group = RanksDouble()
    ranked = RankedSession(session, Replica.of_module(home.model), group, None)
    for step in (1, 2):
        inner_step(home.model, home.optimizer, "home", step)
        waited.append(ranked.boundary(16).waited_s)
        until(lambda: session._life.machine._here > session.base, "its version")
        waited.append(ranked.boundary(0, steps=0).waited_s)
    adopted = told_of(clusters, "version_adopted")[founded:]
    assert len(adopted) == group.shared == 2
    assert sum(waited[:-1]) <= sum(r["waited_s"] for r in adopted) + 1e-5


def test_a_session_that_is_closed_closes_its_log(clusters: Clusters) -> None:
    home = clusters.come_in("home")
    home.session.close()
    assert home.session._events._fd < 0
    clusters.harness.wait_for("closed", node="home")


class Masked(nn.Module):
    """Module with constant buffers, one of them not finite, and a running mean that forward passes update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.inner = nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("third", torch.tensor([1 / 3]))
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += x.detach().mean()
        return self.inner(x) * self.third


def test_constant_buffers_of_a_plain_loop_stay_as_they_are(clusters: Clusters) -> None:
    """Former bug: all floating-point buffers were averaged: a causal mask of infinities prevented the job's founding,
    and constant tables were rounded to bf16.
    """
    told = {"server": clusters.job.server, "name": "loop", "block": 64, "host_server": False}
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, optimizer, buffers=["mean"], data="local", inner_steps=2, **told) as loop:
        for (x,) in loop.prepare([(torch.randn(8, 8),)] * 4):
            model(x).sum().backward()
            optimizer.step()
            loop.step()
    assert loop.session is not None
    agreement = loop.session.agreement
    assert [t.name for t in agreement.tensors] == ["inner.weight", "inner.bias", "mean"]
    assert agreement.averaged == 1
    assert float(model.third) == float(torch.tensor(1 / 3))
    with pytest.raises(StateError, match=r"buffers names \['no'\], which the module has not"):
        DiLoCo(model, optimizer, buffers=["no"], data="local", **told).prepare([(torch.randn(8, 8),)])


def test_what_no_job_can_begin_with_is_named(clusters: Clusters) -> None:
    model = small_model()
    with torch.no_grad():
        model[2].bias.fill_(torch.nan)
    with pytest.raises(ConfigurationError, match=r"no job can begin with what is not finite: 2\.bias$"):
        clusters.come_in("home", model)
    clusters.come_in("after")


def test_positions_that_are_leased_twice_are_an_error_that_says_so(clusters: Clusters) -> None:
    """Former bug: if the leader leased positions twice, a plain training loop ended with a ValueError, or the thread
    that listens to the leader did.
    """
    session = clusters.come_in("home").session
    granted = Granted(session._life.machine.term, (Covered(0, ((0, 4), (2, 6))),))
    session._feed(session._life, Told(granted))
    with pytest.raises(StateError, match=r"contradicts what it holds: leases: positions \[2, 4\) are named"):
        session.boundary(16)


def test_a_version_that_does_not_come_is_waited_for_no_longer_than_patience(clusters: Clusters) -> None:
    """Former bug: a cluster without overlap waited for ever for a version of a server that was gone."""
    home = clusters.come_in("home", overlap=False, patience_s=0.5)
    clusters.job.kill_server()
    for _ in range(home.session.inner_steps - 1):
        home.session.boundary(16)
    with pytest.raises(DeadlineError, match=r"cluster home waited 0\.5 s for"):
        home.session.boundary(16)


def test_a_plain_loop_that_is_dealt_no_samples_says_what_it_waits_for(clusters: Clusters) -> None:
    """A plain training loop gets no samples, since another cluster has leased all of them and makes no progress: it
    gives up and says why.
    """
    data = TensorDataset(torch.zeros(64, 8), torch.zeros(64, 3))
    told = {"server": clusters.job.server, "block": 64, "host_server": False, "patience_s": 0.5, "inner_steps": 4}
    models = small_model(), small_model()
    with contextlib.ExitStack() as loops:
        other, loop = (
            loops.enter_context(DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), name=name, **told))
            for name, model in zip(("other", "loop"), models, strict=True)
        )
        next(other.prepare(DataLoader(data, 8, shuffle=True)))
        with pytest.raises(DeadlineError, match=r"cluster loop waited 0.5 s for samples to train"):
            _ = [loop.step() for _ in loop.prepare(DataLoader(data, 8, shuffle=True))]
        loops.pop_all()
    for each in (loop, other):
        each.__exit__(DeadlineError, None, None)


def test_a_plain_loop_has_the_batch_of_its_loader(clusters: Clusters) -> None:
    """Former bug: a plain training loop's batch size counted as 32 whatever its loader used, and the server weighted
    pushes by it.
    """
    x, y = torch.zeros(24, 8), torch.zeros(24, 3)
    told = {"server": clusters.job.server, "name": "loop", "block": 64, "host_server": False}
    loaders: list[tuple[Any, str]] = [
        (DataLoader(TensorDataset(x, y), 8), "local"),
        (DataLoader(TensorDataset(x, y), batch_sampler=[[*range(12)], [*range(12, 24)]]), "shared"),
        (((x[at : at + 6], y[at : at + 6]) for at in (0, 6)), "local"),
    ]
    batches, seen = list[int](), list[int]()
    for loader, data in loaders:
        model = small_model()
        loop = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.05), data=data, **told)
        with contextlib.suppress(ConfigurationError), loop:  # the job is the first one's
            seen += [len(batch[0]) for batch in loop.prepare(loader)]
        assert loop.session is not None
        batches.append(OuterSettings.of_words(loop.session.agreement.settings).batch)
    assert batches == [8, 12, 6]
    assert seen == [8, 8, 8]


def test_a_plain_loop_names_the_outer_optimizer(clusters: Clusters) -> None:
    """Former bug: a plain training loop could not choose the outer optimizer, as its argument `optimizer` is the inner
    one.
    """
    told = {"server": clusters.job.server, "name": "loop", "block": 64, "host_server": False, "inner_steps": 4}
    model, x = small_model(), torch.randn(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with DiLoCo(model, optimizer, outer_optimizer="sgd", data="local", **told) as loop:
        for (batch,) in loop.prepare([(x,)] * 8):
            optimizer.zero_grad()
            (model(batch) ** 2).mean().backward()
            optimizer.step()
            loop.step()
        assert loop.session is not None
        assert OuterSettings.of_words(loop.session.agreement.settings).optimizer_used == "sgd"
    with pytest.raises(ConfigurationError, match="optimizer"):
        DiLoCo(model, optimizer, outer_optimizer="adam")


def test_an_optimizer_whose_state_is_not_finite_begins_anew_with_the_first_rejection(clusters: Clusters) -> None:
    """Former bug: with NaN in the inner optimizer's state each push was rejected, until the second rejection in a row
    cleared it.
    """
    told = {"server": clusters.job.server, "name": "loop", "block": 64, "host_server": False, "inner_steps": 4}
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(8, 8)
    back = list[bool]()
    with DiLoCo(model, optimizer, data="local", overlap=False, **told) as loop:
        for step, (batch,) in enumerate(loop.prepare([(x,)] * 16)):
            if step == 6:
                optimizer.state[model[0].weight]["exp_avg"][0, 0] = torch.nan
            optimizer.zero_grad()
            (model(batch) ** 2).mean().backward()
            optimizer.step()
            back.append(loop.step().outright)
    assert all(bool(tensor.isfinite().all()) for tensor in model.parameters())
    assert back == [step == 7 for step in range(16)], "the push that covers that step was rejected, and no other one"


def test_an_outage_ends_no_elastic_cluster(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Former bug: if server and first rank were lost together, the next rank failed to start a server, and that ended
    all ranks.
    """
    ranks = clusters.elastic("ranks")
    base, cluster = ranks.cluster.base, ranks.cluster
    asked: list[dict[str, Any]] = []

    def full_disk(*given: Any, **named: Any) -> None:
        asked.append(named)
        raise SchedulerUnreachableError("the parameter server ended at once; No space left on device")

    monkeypatch.setattr(attendant, "host_for_cluster", full_disk)
    clusters.job.kill_server()
    cluster._leave_off()
    cluster.begin(ranks.name, first=True)
    ranks.meet(lambda: "No space left on device" in cluster.waits_for(), "word of the trouble")
    assert asked[0]["again"]
    assert asked[0]["job_id"] == cluster.machine.job_id != ""
    clusters.job.start()
    ranks.train()
    ranks.meet(lambda: cluster.base > base, "the version of its push")


class Tied(nn.Module):
    """Module with one tensor under two names, and a BatchNorm whose statistics are averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.inner, self.outer = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.norm(x)).tanh())[:, :3]


def test_two_clusters_average_statistics_and_a_tensor_with_two_names_once(clusters: Clusters) -> None:
    """The result equals that of two models in one process, each after one inner step, averaged by the outer
    optimizer.
    """
    names = "left", "right"
    rules = OuterSettings(policy="sync", optimizer="sgd", outer_lr=1.0, inner_steps=1, batch=16)
    both = [clusters.come_in(name, Tied(), rules, codec="fp32") for name in names]
    expected = [Tied() for _ in names]
    for model, name in zip(expected, names, strict=True):
        inner_step(model, torch.optim.SGD(model.parameters(), lr=0.05), name, 1)
    for each in both:
        each.steps += 1
        inner_step(each.model, each.optimizer, each.name, each.steps)
        each.session.boundary(16)
    for each in both:
        machine = each.session._life.machine
        until(lambda m=machine: m.open is None and m.freezing is None, "the answer to its push")
        each.settle()
    mean = {
        name: sum(model.state_dict()[name] for model in expected) / 2
        for name, tensor in expected[0].state_dict().items()
        if tensor.is_floating_point()
    }
    for each in both:
        assert each.model.outer.weight is each.model.inner.weight
        assert [t.name for t in each.session.agreement.tensors].count("outer.weight") == 0
        assert each.session.agreement.averaged == 2
        for name, tensor in mean.items():
            assert torch.allclose(each.model.state_dict()[name], tensor, atol=1e-6), name
    assert not torch.allclose(mean["norm.running_mean"], expected[0].norm.running_mean, atol=1e-3)
