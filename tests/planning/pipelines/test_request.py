"""Tests requests for pipelines: that their text is read back, and the errors for invalid ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_lightning.planning.pipelines.job import (
    Device,
    JobError,
    Layer,
    LinkRate,
    MemoryRules,
    NamedLink,
    Overheads,
    TrainingJob,
)
from chaos_lightning.planning.pipelines.request import ON_LOST_PARTS, PIPELINE_POLICIES, PipelineRequest, read_request


def request_of(layers: int = 3, micro_batches: int = 4, **more: Any) -> PipelineRequest:
    made = tuple(Layer(name=f"block.{i}", forward_s=0.1, backward_s=0.2, parameter_nbytes=10) for i in range(layers))
    device = Device(name="me", memory_nbytes=100)
    job = TrainingJob(layers=made, devices=(device,), micro_batches=micro_batches)
    values: dict[str, Any] = {"job": job, "policy": "adaptive", "copies": 2, **more}
    return PipelineRequest(**values)


@st.composite
def requests(draw: st.DrawFn) -> PipelineRequest:
    seconds, nbytes = st.floats(1e-6, 1e3), st.integers(0, 1 << 40)
    layers = tuple(
        Layer(
            name=f"{draw(st.text(max_size=3))}.{i}",
            forward_s=draw(seconds),
            backward_s=draw(seconds),
            parameter_nbytes=draw(nbytes),
            activation_nbytes=draw(nbytes),
            output_nbytes=draw(nbytes),
        )
        for i in range(draw(st.integers(2, 5)))
    )
    job = TrainingJob(
        layers=layers,
        devices=(Device(name="me", memory_nbytes=draw(st.integers(1, 1 << 40)), speed=draw(st.floats(0.01, 100.0))),),
        micro_batches=draw(st.integers(1, 64)),
        between_hosts=LinkRate(rate_bps=draw(st.floats(1.0, 1e12)), latency_s=draw(st.floats(0.0, 1.0))),
        overheads=Overheads(hop_s=draw(st.floats(0.0, 1.0))),
        memory=MemoryRules(flat_buffers=draw(st.integers(0, 3))),
        tied_nbytes=draw(nbytes),
    )
    users = st.sets(st.integers(0, len(layers) - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    return PipelineRequest(
        job,
        draw(st.sampled_from(PIPELINE_POLICIES)),
        draw(st.integers(1, 4)),
        draw(st.dictionaries(st.text(max_size=5), users, max_size=2)),
        draw(st.sampled_from(ON_LOST_PARTS)),
    )


@given(requests())
def test_a_request_is_the_same_after_its_way_as_text(request: PipelineRequest) -> None:
    text = request.to_json()
    again = PipelineRequest.from_json(text)
    assert again == request
    assert again.to_json() == text
    assert again.terms == request.terms


def test_equal_requests_have_equal_texts_whatever_the_order_of_shared_parameters() -> None:
    one = request_of(shared={"a": (0, 2), "b": (0, 1)})
    assert one.to_json() == request_of(shared={"b": (0, 1), "a": (0, 2)}).to_json()


def test_terms_leave_out_what_each_member_measures() -> None:
    one = request_of()
    slower = replace(one.job, layers=tuple(replace(x, forward_s=9.0, parameter_nbytes=7) for x in one.job.layers))
    assert replace(one, job=slower).terms == one.terms
    others = [
        request_of(4), request_of(micro_batches=5), request_of(policy="reroute"), request_of(copies=1),
        request_of(on_lost_parts="end"), request_of(shared={"w": (0, 1)}),
    ]  # fmt: skip
    assert len({one.terms, *(x.terms for x in others)}) == 7


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: request_of(policy="best"), "policy is 'best'; expected one of adaptive, reroute, dynamic, restart"),
        (lambda: request_of(copies=0), "copies is 0; expected a whole number of at least 1"),
        (lambda: request_of(copies=True), "copies is True"),
        (lambda: request_of(on_lost_parts="go"), "on_lost_parts is 'go'; expected one of wait, end"),
        (lambda: request_of(shared={"w": (0,)}), "'w' is shared by layers \\[0\\]; expected two or more of 3 layers"),
        (lambda: request_of(shared={"w": (1, 0)}), "each once, in order"),
        (lambda: request_of(shared={"w": (0, 3)}), "two or more of 3 layers"),
        (lambda: request_of(micro_batches=1 << 17), "131072 micro-batches; expected at most 65536"),
        (lambda: request_of(1000, 5000), "a product of at most"),
    ],
)
def test_what_cannot_be_is_refused(made: Callable[[], PipelineRequest], words: str) -> None:
    with pytest.raises(JobError, match=words):
        made()


def test_a_request_has_the_members_own_device_alone() -> None:
    job = request_of().job
    two = replace(job, devices=(*job.devices, replace(job.devices[0], name="you")))
    with pytest.raises(JobError, match="2 devices are given"):
        request_of(job=two)
    hosted = replace(job, devices=(replace(job.devices[0], host="h"),))
    with pytest.raises(JobError, match="links are given"):
        request_of(job=replace(hosted, links=(NamedLink(a="h", b="h", rate_bps=1.0),)))


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    about = json.loads(request_of(shared={"w": (0, 1)}).to_json())
    change(about)
    return json.dumps(about)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "has list; expected the keys copies, job"),
        (changed(lambda a: a.pop("policy")), "expected the keys"),
        (changed(lambda a: a.update(more=1)), "'more'"),
        (changed(lambda a: a.update(shared=[1])), "shared is \\[1\\]"),
        (changed(lambda a: a.update(shared={"w": [0, "1"]})), "shared by layers"),
        (changed(lambda a: a.update(copies="2")), "copies is '2'"),
        (changed(lambda a: a.update(policy=["adaptive"])), "policy is"),
        (changed(lambda a: a.update(job=3)), "devices is None; expected the member's own"),
        (changed(lambda a: a["job"]["devices"].append(a["job"]["devices"][0])), "expected the member's own device"),
        (changed(lambda a: a["job"]["devices"][0].update(count=99_999)), "has 'count'; expected each layer"),
        (changed(lambda a: a["job"]["layers"][0].update(repeat=9_999)), "has 'repeat'"),
        (changed(lambda a: a["job"].update(decoder={"layers": 9})), "has 'decoder'"),
        (changed(lambda a: a["job"]["layers"][0].update(forward_s=-1)), "forward_s"),
        (changed(lambda a: a["job"].update(layers=None)), "layers"),
    ],
)
def test_texts_that_are_no_request_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        read_request(text)
