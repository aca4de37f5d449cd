"""Tests pulling when donors' states differ from each other, or do not fit the joiner."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

import pytest
import torch
from replication_support import (
    HEAD,
    LIMIT_S,
    OTHER,
    PATIENT,
    SEQ,
    First,
    Plain,
    Proxy,
    cut,
    dial,
    donors,
    numbered,
    publishing,
    pull,
)

from chaos_lightning.errors import ChaosError, StateError
from chaos_lightning.replication import (
    Endpoint,
    PullConfig,
    StateServerConfig,
    pull_result,
    pull_state,
    state_hash,
)

# --- other states ----------------------------------------------------------------------------------------------------


def test_a_donor_at_another_header_of_the_slot_is_refused() -> None:
    theirs, mine = numbered(3, 100), numbered(3, 100, seed=1)
    with donors("fork", "b") as started:
        started[0].server.publish(OTHER, SEQ, numbered(3, 100, seed=2).tensors(), {})
        started[1].server.publish(HEAD, SEQ, theirs.tensors(), {})
        report = pull([d.endpoint for d in started], mine)
    assert f"this member serves the state at header {OTHER} (slot {SEQ})" in report.failed["fork"]
    assert report.by_source == {"b": 1200}


def test_a_donor_that_went_on_is_refused() -> None:
    theirs = numbered(3, 100)
    with donors("a", "b", "c") as started:
        started[0].server.publish(OTHER, SEQ + 1, theirs.tensors(), {})
        started[1].server.publish(HEAD, SEQ, theirs.tensors(), {})
        started[1].server.withdraw()
        started[2].server.close()
        with pytest.raises(StateError) as error:
            pull([d.endpoint for d in started], numbered(3, 100, seed=1))
    assert f"serves the state at header {OTHER} (slot {SEQ + 1})" in str(error.value)
    assert f"withdrew its last state, that of slot {SEQ}" in str(error.value)


def test_a_header_that_never_comes() -> None:
    config = StateServerConfig(publish_timeout_s=0.05, pending_interval_s=0.02)
    with donors("a", config=config) as started, pytest.raises(StateError, match=r"not published within 0\.05 s"):
        pull([started[0].endpoint], numbered(1, 1))


def test_the_majority_is_taken_and_who_differs_is_named() -> None:
    theirs, mine = numbered(3, 1000), numbered(3, 1000, seed=1)
    with publishing(theirs, "odd", "b", "c") as started:
        started[0].server.publish(HEAD, SEQ, numbered(3, 1000, seed=2).tensors(), theirs.manifest())
        report = pull([d.endpoint for d in started], mine)
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())
    assert "odd" not in report.by_source
    assert set(report.disagreeing) <= {"odd"}


def test_of_two_that_differ_the_older_is_taken() -> None:
    theirs, mine = numbered(3, 1000), numbered(3, 1000, seed=1)
    with publishing(theirs, "old", "young") as started:
        started[1].server.publish(HEAD, SEQ, numbered(3, 1000, seed=2).tensors(), theirs.manifest())
        report = pull([d.endpoint for d in started], mine, policy=First("young"))
    assert report.corrupted == 0  # it was not even asked
    assert report.disagreeing == ("young",)
    assert report.by_source == {"old": 12_000}
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([("w", torch.zeros(3)), ("b", torch.zeros(4, 2))], r"'b' float32\[4, 2\] where .* 'b' float32\[4, 3\]"),
        ([("w", torch.zeros(3).half()), ("b", torch.zeros(4, 3))], r"'w' float16\[3\] where .* 'w' float32\[3\]"),
        ([("v", torch.zeros(3)), ("b", torch.zeros(4, 3))], r"'v' float32\[3\] where .* 'w' float32\[3\]"),
        ([("w", torch.zeros(3))], r"1 tensors, this member 2; only this member has tensor 'b' float32\[4, 3\]"),
        (
            [("w", torch.zeros(3)), ("b", torch.zeros(4, 3)), ("c", torch.zeros(1))],
            r"3 tensors, this member 2; only the donor has tensor 'c' float32\[1\]",
        ),
    ],
)
def test_unequal_layouts_name_the_first_difference(theirs: list[tuple[str, torch.Tensor]], words: str) -> None:
    mine = Plain([("w", torch.zeros(3)), ("b", torch.zeros(4, 3))])
    with publishing(Plain(theirs), "a") as started, pytest.raises(StateError, match=words):
        pull([started[0].endpoint], mine)


def test_adopting_must_not_change_the_state() -> None:
    class Meddler(Plain):
        def adopt(self, manifest: Mapping[str, object]) -> None:
            self.named[1][1].add_(1)

    theirs = numbered(3, 10)
    mine = Meddler(numbered(3, 10, seed=1).named)
    with (
        publishing(theirs, "a") as started,
        pytest.raises(StateError, match="after the state was adopted, tensor 't1'"),
    ):
        pull([started[0].endpoint], mine)


# --- tensors of the manifest -----------------------------------------------------------------------------------------


def test_losing_the_lead_before_its_manifests_tensors_arrived() -> None:
    """The donor whose manifest was adopted is lost before the tensors that only this manifest has arrived; another
    donor's manifest is adopted instead.
    """
    theirs, mine = numbered(10, 100_000), numbered(10, 100_000, seed=1)
    lost = threading.Event()

    def never_the_end(data: bytearray, position: int) -> None:
        if position > 4_200_000:  # past the replicated tensors
            lost.set()
            cut()

    def dial_late(endpoint: Endpoint) -> socket.socket:
        assert endpoint.member != "c" or lost.wait(LIMIT_S)
        return dial(endpoint)

    with publishing(theirs, "lead", "b", "c") as started:
        for number, donor in enumerate(started):
            donor.server.publish(
                HEAD, SEQ, theirs.tensors(), {"name": donor.member, "own": torch.full((400_000,), float(number + 1))}
            )
        proxy = Proxy(started[0].endpoint, never_the_end)
        report = pull_state(
            [proxy.endpoint, started[1].endpoint, started[2].endpoint],
            dial_late,
            head=HEAD,
            seq=SEQ,
            state=mine,
            config=PATIENT,
            policy=First("lead"),
        )
        proxy.close()
    assert report.rounds == 2
    assert list(report.failed) == ["lead"]
    assert mine.adopted is not None
    assert mine.adopted["name"] == "b"
    assert torch.equal(mine.adopted["own"], torch.full((400_000,), 2.0))
    assert state_hash(mine.tensors()) == state_hash(theirs.tensors())


def test_too_many_tensors_in_a_manifest_are_refused() -> None:
    theirs = Plain([("w", torch.zeros(3))], {"big": torch.zeros(1000)})
    config = PullConfig(deadline_s=LIMIT_S, max_attached_nbytes=3999)
    with (
        publishing(theirs, "a") as started,
        pytest.raises(StateError, match="4000 bytes of tensors, the limit is 3999"),
    ):
        pull([started[0].endpoint], Plain([("w", torch.zeros(3))]), config)


# --- the caller's mistakes -------------------------------------------------------------------------------------------


def test_nonsense_is_refused_at_once() -> None:
    state = numbered(1, 1)
    here = Endpoint("a", "127.0.0.1", 1)
    with pytest.raises(ValueError, match="at least one donor"):
        pull([], state)
    with pytest.raises(ValueError, match="listed twice"):
        pull([here, here], state)
    with pytest.raises(ValueError, match="16 lower-case hex digits"):
        pull_state([here], dial, head="latest", seq=SEQ, state=state)
    for wrong in ({"deadline_s": 0}, {"depth": 0}, {"request_nbytes": 0}, {"request_nbytes": 1 << 40}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PullConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flat contiguous uint8"):
        pull_result([here], dial, head=HEAD, seq=SEQ, memory=torch.zeros(4), spans={})


def test_errors_of_the_state_end_the_pull() -> None:
    class Refuser(Plain):
        def prepare(self, manifest: Mapping[str, object], table: object) -> None:
            raise StateError("no room")

    with publishing(numbered(1, 10), "a") as started:
        with pytest.raises(ChaosError, match="no room"):
            pull([started[0].endpoint], Refuser(numbered(1, 10).named))
        ended = list(started[0].acceptor.threads)
        for thread in ended:
            thread.join(LIMIT_S)
    assert started[0].endings == ["joiner closed the connection"]
