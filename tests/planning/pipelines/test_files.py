"""Tests job files: what is read, the error texts, and that written jobs are read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_lightning.planning.pipelines.decoder import Decoder
from chaos_lightning.planning.pipelines.files import find_job, job_of, read_job, schema, to_dict
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
from chaos_lightning.planning.quantities import size_nbytes

PLANS = Path(__file__).resolve().parents[3] / "examples" / "plans"
LAYER = {"name": "a", "forward_s": 1, "backward_s": 2}
DEVICES = [{"name": "d", "count": 4, "memory_nbytes": 1000}]
JOB = {"micro_batches": 4, "layers": [LAYER], "devices": DEVICES}
TEXT = """
micro_batches: 32
layers:
  - {name: embedding, forward_s: 1 ms, backward_s: 2e-3, parameter_nbytes: 260 MB, output_nbytes: 16 MiB}
  - {name: block, repeat: 3, forward_s: 7.5 ms, backward_s: 0.015, parameter_nbytes: 4.05e8}
devices:
  - {name: d, count: 6, per_host: 2, memory_nbytes: 80 GiB}
  - {name: box, host: attic, memory_nbytes: 1 GB, speed: 0.5}
  - {name: e, count: 4, hosts: [x, y], memory_nbytes: 10}
  - {name: f, count: 3, per_host: 2, memory_nbytes: 10}
between_hosts: {rate_bps: 100 Gbps, latency_s: 10 us}
links:
  - {a: attic, b: d0, rate_bps: 1 Mbps}
"""


def said(about: Any, devices: int | None = None) -> str:
    """Returns the error text with which a job is refused."""
    with pytest.raises(JobError) as refused:
        job_of(about, "job.yaml", devices)
    return str(refused.value)


def test_quantities_have_units_and_entries_stand_for_several(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(TEXT)
    job = read_job(path)
    assert [x.name for x in job.layers] == ["embedding", "block.0", "block.1", "block.2"]
    assert job.layers[0] == Layer(
        name="embedding", forward_s=0.001, backward_s=0.002, parameter_nbytes=260_000_000, output_nbytes=16 << 20
    )
    assert job.layers[2].backward_s == 0.015
    assert job.layers[2].parameter_nbytes == 405_000_000
    assert [(d.name, d.host) for d in job.devices] == [
        ("d0", "host0"), ("d1", "host0"), ("d2", "host1"), ("d3", "host1"), ("d4", "host2"), ("d5", "host2"),
        ("box", "attic"), ("e0", "x"), ("e1", "x"), ("e2", "y"), ("e3", "y"),
        ("f0", "host3"), ("f1", "host3"), ("f2", "host4"),
    ]  # fmt: skip
    assert job.between_hosts == LinkRate(rate_bps=100e9, latency_s=10 * 1e-6)
    assert job.link("box", "d0") == LinkRate(rate_bps=1e6)


def test_json_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB))
    assert read_job(path) == job_of(JOB)


def test_other_numbers_of_devices() -> None:
    assert [d.name for d in job_of(JOB, devices=2).devices] == ["d0", "d1"]
    assert [d.name for d in job_of(JOB, devices=6).devices] == ["d0", "d1", "d2", "d3", "d4", "d5"]
    two = JOB | {"devices": [*DEVICES, {"name": "e", "count": 1, "memory_nbytes": 5}]}
    assert [d.name for d in job_of(two, devices=7).devices] == ["d0", "d1", "d2", "d3", "e0", "e1", "e2"]
    assert [d.name for d in job_of(two, devices=3).devices] == ["d0", "d1", "d2"]
    one = JOB | {"devices": [{"name": "e", "memory_nbytes": 5}]}
    assert "--devices is 2; expected at most 1" in said(one, 2)
    assert "--devices is 0; expected" in said(JOB, 0)
    assert "--devices is 100000000; expected a finite number at most 100,000" in said(JOB, 10**8)
    with pytest.raises(JobError, match="--devices is 100000000; expected a finite number at most 100,000"):
        find_job("gpt:3,256", 10**8)


def test_cards_of_one_tensor_parallel_group_are_one_device() -> None:
    """With tensor parallelism of 8, 32 cards are four devices, and a fault takes eight cards at once."""
    devices = [{"name": "n", "count": 32, "per_host": 16, "memory_nbytes": 64}]
    job = job_of(JOB | {"tensor_parallel": 8, "devices": devices})
    assert [(d.name, d.host, d.cards, d.memory_nbytes) for d in job.devices] == [
        ("n0", "host0", 8, 512), ("n1", "host0", 8, 512), ("n2", "host1", 8, 512), ("n3", "host1", 8, 512),
    ]  # fmt: skip
    assert len(job_of(JOB | {"tensor_parallel": 8, "devices": devices}, devices=3).devices) == 3
    odd = JOB | {"tensor_parallel": 8, "devices": [{"name": "n", "count": 12, "memory_nbytes": 64}]}
    assert "count is 12, per_host is 0; expected multiples of tensor_parallel (8)" in said(odd)


def test_a_decoder_stands_for_layers() -> None:
    about = {"micro_batches": 4, "devices": DEVICES, "decoder": {"layers": 3, "width": 256, "micro_batch": 2}}
    job = job_of(about)
    assert job.layers == Decoder(layers=3, width=256, micro_batch=2).made()
    assert job.samples == 2
    assert job_of(about | {"samples": 5}).samples == 5
    assert job_of(about | {"tensor_parallel": 2}).layers == Decoder(layers=3, width=256, micro_batch=2, cards=2).made()
    assert "decoder.cards is 2; expected tensor_parallel" in said(
        about | {"decoder": {"layers": 3, "width": 256, "cards": 2}}
    )
    assert "decoder.width is 0; expected" in said(about | {"decoder": {"layers": 3, "width": 0}})


def test_a_model_is_a_file_or_a_formula() -> None:
    assert find_job(str(PLANS / "llama7b.yaml"), 7) == read_job(PLANS / "llama7b.yaml", 7)
    job = find_job("gpt:3,256", 20)
    assert job.layers == Decoder(layers=3, width=256).made()
    assert [(d.name, d.host) for d in job.devices][7:9] == [("d7", "host0"), ("d8", "host1")]
    assert (len(job.devices), job.micro_batches) == (20, 80)
    assert len(find_job("gpt:3,256").devices) == 8
    with pytest.raises(JobError, match="expected gpt:LAYERS,WIDTH"):
        find_job("gpt:3")


def changed(**fields: Any) -> dict[str, Any]:
    return JOB | {"layers": [LAYER, LAYER | {"name": "b"} | fields]}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (changed(forward_s=0), "layers[1].forward_s is 0.0; expected a finite number above 0"),
        (changed(backward_s="-2 ms"), "layers[1].backward_s is -0.002; expected a finite number above 0"),
        (changed(forward_s=math.nan), "layers[1].forward_s is nan; expected a finite number above 0"),
        (changed(forward_s=math.inf), "layers[1].forward_s is inf; expected a finite number above 0"),
        (changed(forward_s="2 GB"), "layers[1].forward_s is '2 GB'; expected seconds, as a number or as in '2.5 ms'"),
        (changed(forward_s=[1]), "layers[1].forward_s is [1]; expected seconds, as a number or as in '2.5 ms'"),
        (changed(forward_s=True), "layers[1].forward_s is true; expected seconds, as a number or as in '2.5 ms'"),
        (changed(output_nbytes=1.5), "layers[1].output_nbytes is 1.5; expected bytes, as a whole number or as "),
        (changed(output_nbytes=-1), "layers[1].output_nbytes is -1; expected a finite number at least 0"),
        (changed(backward_input_s=5), "layers[1].backward_input_s is 5; expected less than backward_s (2)"),
        (changed(repeat=0), "layers[1].repeat is 0; expected a finite number at least 1"),
        (changed(repeat=10**9), "layers are more than 10000; expected a smaller repeat"),
        (
            JOB | {"layers": [LAYER | {"repeat": 9999}, LAYER | {"name": "b", "repeat": 2}]},
            "layers are more than 10000; expected a smaller repeat",
        ),
        (JOB | {"decoder": {"layers": 9999, "width": 64}, "layers": []}, "decoder.layers is 9999; expected a finite"),
        (JOB | {"micro_batches": 10**8}, "micro_batches is 100000000; expected a finite number at most 1,000,000"),
        (changed(output_nbytes=10**309), "layers[1].output_nbytes is 1"),
        (changed(forwards=1), "layers[1].forwards is an unknown key (did you mean 'forward_s'?); expected some of "),
        (changed(name=5), "layers[1].name is 5; expected a text; write it in quotes"),
        (changed(name="a"), "layers: the name 'a' is given twice; expected each to have its own"),
        (JOB | {"layers": [{"name": "a", "forward_s": 1}]}, "layers[0].backward_s is missing; expected seconds"),
        (JOB | {"layers": []}, "layers and decoder: neither has any; expected at least one layer"),
        (JOB | {"layers": {"name": "a"}}, 'layers is {"name": "a"}; expected a list'),
        (JOB | {"layers": [3]}, "layers[0] is 3; expected a mapping"),
        (JOB | {"decoder": {"layers": 1, "width": 64}}, "layers and decoder: both are given; expected"),
        (JOB | {"micro_batches": 0}, "micro_batches is 0; expected a finite number at least 1"),
        (JOB | {"micro_batches": "4"}, 'micro_batches is "4"; expected a whole number'),
        (JOB | {"micro_batch": 4}, "micro_batch is an unknown key (did you mean 'micro_batches'?); expected some of "),
        (JOB | {"devices": []}, "devices is empty; expected at least one device"),
        (JOB | {"devices": [*DEVICES, *DEVICES]}, "devices: the name 'd0' is given twice; expected each"),
        (JOB | {"devices": [DEVICES[0] | {"speed": 0}]}, "devices[0].speed is 0.0; expected a finite number above 0"),
        (JOB | {"devices": [DEVICES[0] | {"count": 0}]}, "devices[0].count is 0; expected a finite number at least 1"),
        (JOB | {"devices": [DEVICES[0] | {"count": 10**9}]}, "devices are more than 100000; expected"),
        (JOB | {"devices": [DEVICES[0] | {"host": "x", "per_host": 2}]}, "devices[0]: host, per_host and hosts say"),
        (JOB | {"devices": [{"name": "d"}]}, "devices[0].memory_nbytes is missing; expected bytes, as a whole number"),
        (JOB | {"links": [{"a": "d0", "b": "dd", "rate_bps": 5}]}, "links: d0-dd leads to 'dd', which is no device"),
        (JOB | {"links": [{"a": "d0", "b": "d1", "rate_bps": 0}]}, "links: d0-d1: rate_bps is 0.0; expected a finite"),
        (JOB | {"links": [{"a": "d0", "b": "d0", "rate_bps": 5}]}, "links: d0-d0 leads from a device to itself; exp"),
        (
            JOB | {"links": [{"a": "d0", "b": "d1", "rate_bps": 5}, {"a": "d1", "b": "d0", "rate_bps": 6}]},
            "links: d1-d0 is given twice, in one direction or both; expected it once",
        ),
        (JOB | {"devices": [DEVICES[0] | {"host": "d1"}]}, "devices: 'd1' is a device and a host; expected another"),
        (JOB | {"within_host": {"rate_bps": "1 GB"}}, "within_host.rate_bps is '1 GB'; expected bits per second"),
        (JOB | {"within_host": {"rate_bps": -1}}, "within_host.rate_bps is -1.0; expected a number above 0"),
        (JOB | {"overheads": {"hop_s": -1}}, "overheads.hop_s is -1.0; expected a finite number at least 0"),
        (JOB | {"memory": {"boundaries": 1}}, "memory.boundaries is 1; expected true or false"),
        (None, "the file is nothing; expected a mapping"),
        ([], "the file is []; expected a mapping"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(about: Any, words: str) -> None:
    line = said(about)
    assert line.startswith(f"job.yaml: {words}")
    assert "\n" not in line


def test_each_thing_that_is_wrong_has_a_line() -> None:
    lines = said(JOB | {"layers": [LAYER | {"forward_s": 0}, LAYER | {"name": "b", "x": 1}]}).splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["job.yaml: layers[0].forward_s", "job.yaml: layers[1].x"]
    lines = said(JOB | {"layers": [LAYER | {"name": f"n{i}", "forward_s": 0} for i in range(20)]}).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "job.yaml: and 12 more"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "micro_batches: [", ":2: no YAML: "),
        ("a.yaml", "micro_batches: 4\nmicro_batches: 5\n", ":2: the key 'micro_batches' is there twice in one mapping"),
        ("a.yaml", "layers:\n- {name: a, name: b}\n", ":2: the key 'name' is there twice in one mapping"),
        ("a.yaml", "&a [*a]", ":1: an anchor that contains itself"),
        ("a.yaml", "micro_batches: 4\0", ": no YAML: "),
        ("a.yaml", "[" * 5000, ":2: no YAML"),
        ("a.json", "[" * 100_000, ": nested too deep"),
        ("a.yaml", "a: !!python/object:os.system x", ":1: no YAML: could not determine a constructor"),
        ("a.json", '{"a": 1,\n', ":2: no JSON: "),
        ("a.json", '{"a": 1, "a": 2}', ": the key 'a' is there twice in one mapping; expected it once"),
        ("a.json", '{"micro_batches": NaN}', ": micro_batches is NaN; expected a whole number"),
        ("a.yaml", "\xff", ": the file is "),
        ("a.yaml", f"micro_batches: {'9' * 5000}", ": a value cannot be read: "),
        ("a.json", f'{{"micro_batches": {"9" * 5000}}}', ": a value cannot be read: "),
    ],
)
def test_what_is_no_file_of_a_job(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(JobError) as refused:
        read_job(path)
    assert str(refused.value).startswith(f"{path}{words}")
    assert all(line.startswith(str(path)) for line in str(refused.value).splitlines())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot be read: .*; expected a job as YAML or JSON"):
        read_job(tmp_path / "none.yaml")
    with pytest.raises(JobError, match="cannot be read"):
        read_job(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(JobError, match="cannot be read"):
        read_job(tmp_path / "x.yaml")


def test_sizes() -> None:
    sizes = {"80 GiB": 80 << 30, "1.5 kB": 1500, "2TB": 2 * 10**12, "7 B": 7, "0 MB": 0}
    assert {text: size_nbytes(text) for text in sizes} == sizes
    for wrong in ("80", "80 Gb", "GiB", "1 gib", ""):
        with pytest.raises(ValueError, match="expected a size such as '80 GiB'"):
            size_nbytes(wrong)


times = st.floats(1e-6, 1e3)
sizes = st.integers(0, 1 << 40)
layers = st.lists(
    st.builds(
        Layer,
        name=st.text(min_size=1, max_size=5),
        forward_s=times,
        backward_s=times,
        parameter_nbytes=sizes,
        output_nbytes=sizes,
        optimizer_s=st.floats(0, 1),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda x: x.name,
)
devices = st.lists(
    st.builds(
        Device,
        name=st.text(min_size=1, max_size=5),
        memory_nbytes=st.integers(1, 1 << 50),
        speed=st.floats(0.1, 10),
        host=st.text(max_size=2),
        unit=st.text(max_size=2),
        cards=st.integers(1, 8),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda x: x.name,
)
links = st.builds(LinkRate, rate_bps=st.one_of(st.just(math.inf), st.floats(1, 1e12)), latency_s=st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(layers, devices, links, links, st.integers(1, 99), st.integers(1, 9), st.booleans())
def test_what_is_written_is_read_as_the_same_job(
    layers: list[Layer], devices: list[Device], within: LinkRate, between: LinkRate, m: int, samples: int, more: bool
) -> None:
    hosts = {d.host: f"host {d.host}" if d.host else "" for d in devices}
    devices = [replace(d, host=hosts[d.host]) for d in devices]
    ends = [d.name for d in devices]
    more = more and len(ends) > 1
    job = TrainingJob(
        layers=tuple(layers),
        devices=tuple(devices),
        micro_batches=m,
        within_host=within,
        between_hosts=between,
        links=(NamedLink(a=ends[0], b=ends[-1], rate_bps=5.0),) if more else (),
        samples=samples,
        overheads=Overheads(hop_s=0.5) if more else Overheads(),
        memory=MemoryRules(flat_buffers=0, boundaries=True) if more else MemoryRules(),
    )
    assert job_of(json.loads(json.dumps(to_dict(job)))) == job


def test_the_schema_is_of_json_and_knows_units() -> None:
    about = json.loads(json.dumps(schema()))
    assert about["required"] == ["micro_batches", "devices"]
    layer = about["$defs"]["LayerEntry"]["properties"]
    assert layer["forward_s"]["type"] == ["number", "string"]
    assert layer["repeat"]["type"] == "integer"
    assert json.loads(json.dumps(about, allow_nan=False)) == about


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_read(path: Path) -> None:
    job = read_job(path)
    assert job_of(to_dict(job)) == job


def test_what_the_examples_are() -> None:
    assert len(list(PLANS.glob("*.yaml"))) == 3
    llama, shared = read_job(PLANS / "llama7b.yaml"), read_job(PLANS / "llama33b-tp8.yaml")
    assert len(llama.devices) == 8
    assert [d.cards for d in shared.devices] == [8, 8, 8, 8]
    assert len({d.kind for d in read_job(PLANS / "edge.yaml").devices}) == 3
