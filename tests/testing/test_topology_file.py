"""Tests topology files: what they mean, and that each mistake is reported with file, line, key, and the expected
value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.quantities import rate_bps, seconds
from chaos_lightning.testing.edge.topology import Change, Condition, EdgeNode, Link, Topology
from chaos_lightning.testing.edge.topology_file import load_topology

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "topologies"

FULL = """\
name: three boxes
nodes: [edge-1, edge-2, {name: edge-3, access: 200 Mbps, starts: 1 min}]
links:
  - {between: [edge-1, edge-2], rate: 300 Mbps, latency: 20 ms}
  - between: [edge-2, edge-3]
    rate: 1.5 Gbps
schedule:
  - {at: 30 s, link: [edge-1, edge-2], rate: 10%}
  - {at: 60 s, link: [[edge-2, edge-3], [edge-1, edge-2]], state: cut, for: 500 ms}
  - {every: 3 min, rate: {from: 100 Mbps, to: 1000 Mbps}, seed: 4}
  - {at: 0, link: all, latency: 1 ms, rate: 64 kbps}
"""
MEANT = Topology(
    nodes=(EdgeNode("edge-1"), EdgeNode("edge-2"), EdgeNode("edge-3", 200e6, 60.0)),
    links=(Link("edge-1", "edge-2", 300e6, 0.02), Link("edge-2", "edge-3", 1.5e9)),
    schedule=(
        Change(at_s=30, links=(("edge-1", "edge-2"),), share=0.1),
        Change(at_s=60, links=(("edge-2", "edge-3"), ("edge-1", "edge-2")), condition=Condition.CUT, for_s=0.5),
        Change(every_s=180, rate_bps=(100e6, 1000e6), seed=4),
        Change(latency_s=0.001, rate_bps=(64e3, 64e3)),
    ),
    name="three boxes",
)


def written(folder: Path, text: str, name: str = "net.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_means_what_it_says(tmp_path: Path) -> None:
    assert load_topology(written(tmp_path, FULL)) == MEANT


def test_json_says_the_same_as_yaml(tmp_path: Path) -> None:
    text = json.dumps(yaml.safe_load(FULL))
    assert load_topology(written(tmp_path, text, "net.json")) == MEANT


def test_a_file_without_a_name_is_called_by_its_own(tmp_path: Path) -> None:
    topology = load_topology(written(tmp_path, "nodes: [alone]\n", "home.yaml"))
    assert (topology.name, topology.names, topology.links) == ("home", ("alone",), ())


def test_words_that_yaml_takes_for_something_else_are_names(tmp_path: Path) -> None:
    text = "nodes: [no, 1e3, 0x1]\nlinks: [{between: [no, 1e3], rate: 1 Mbps}, {between: [1e3, 0x1], rate: 1 Mbps}]\n"
    assert load_topology(written(tmp_path, text)).names == ("no", "1e3", "0x1")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_examples_can_be_read(path: Path) -> None:
    assert len(load_topology(path).nodes) >= 3


LINKS = "links: [{between: [a, b], rate: 1 Mbps}]\n"
TWO = f"nodes: [a, b]\n{LINKS}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "net.yaml: 'nodes' is missing or empty; expected a list"),
        ("nodes: []\n", "net.yaml:1: nodes: there are none; expected at least one name"),
        ("[1, 2]\n", "net.yaml:1: a list; expected the keys name, nodes, links, schedule"),
        ("nodes: [a, b\n", "net.yaml:2: no YAML: "),
        ("nodes: [a]\nnode: [b]\n", "net.yaml:2: node: unknown key 'node' (did you mean 'nodes'?); expected some of"),
        ("nodes: [a]\nnodes: [b]\n", "net.yaml:2: the key 'nodes' is there twice in one mapping (before in line 1)"),
        ("nodes: a\n", "net.yaml:1: nodes: 'a'; expected a list"),
        ("nodes:\n- a\n- {access: 1 Mbps}\n", "net.yaml:3: nodes[1]: a node without 'name'"),
        ("nodes:\n- a\n- [b]\n", "net.yaml:3: nodes[1]: a list; expected the keys name, access, starts"),
        ("nodes: [a, b]\n", "net.yaml:1: 'links' is missing or empty; expected a list"),
        (
            "nodes: [a, b]\nlinks:\n- {between: [a, b], rat: 1 Mbps}\n",
            "net.yaml:3: links[0].rat: unknown key 'rat' (did you mean 'rate'?); expected some of between, rate",
        ),
        ("nodes: [a, b]\nlinks:\n- {between: [a, b]}\n", "net.yaml:3: links[0]: a link without 'rate'"),
        ("nodes: [a, b]\nlinks:\n- {between: a, rate: 1 bps}\n", "net.yaml:3: links[0].between: 'a'; expected the two"),
        (
            "nodes: [a, b]\nlinks:\n- between: [a, b]\n  rate: 300\n",
            "net.yaml:4: links[0].rate: '300': expected a rate such as '300 Mbps' (bps, kbps, Mbps, Gbps, Tbps)",
        ),
        (
            "nodes: [a, b]\nlinks:\n- between: [a, b]\n  rate: 30 MBps\n",
            "net.yaml:4: links[0].rate: '30 MBps' counts bytes; expected bits, such as '240 Mbps'",
        ),
        (
            "nodes: [a, b]\nlinks:\n- between: [a, b]\n  rate: 0 bps\n",
            "net.yaml:4: links[0].rate: 0 bps: expected a po",
        ),
        (
            "nodes: [a, b]\nlinks:\n- between: [a, b]\n  rate: -3 Mbps\n",
            "net.yaml:4: links[0].rate: -3e+06 bps: expect",
        ),
        ("nodes: [a, b]\nlinks:\n- between: [a, b]\n  rate:\n", "net.yaml:4: links[0].rate: nothing; expected a text"),
        (
            "nodes: [a, b]\nlinks:\n- {between: [a, b], rate: 1 bps, latency: 20}\n",
            "net.yaml:3: links[0].latency: '20': expected a time such as '20 ms' or '3 min' (us, ms, s, min, h)",
        ),
        (f"nodes: [a, b, c]\n{LINKS}", "net.yaml:2: links: the graph is not connected, it has 2 parts: a, b | c"),
        (
            "nodes: [a, b]\nlinks:\n- {between: [a, b], rate: 1 bps}\n- {between: [b, a], rate: 1 bps}\n",
            "net.yaml:4: links[1].between: b and a have a link already (links[0])",
        ),
        (
            "nodes: [a, b]\nlinks:\n- {between: [a, x], rate: 1 bps}\n",
            "net.yaml:3: links[0].between: unknown node 'x'; expected some of a, b",
        ),
        (f"{TWO}schedule: [{{link: [a, b], state: cut}}]\n", "net.yaml:3: schedule[0]: it never happens; expected at:"),
        (
            f"{TWO}schedule: [{{at: 5 s, state: gone}}]\n",
            "schedule[0].state: 'gone': expected one of whole, cut, stalled",
        ),
        (f"{TWO}schedule: [{{at: 5 s}}]\n", "net.yaml:3: schedule[0]: it changes nothing"),
        (f"{TWO}schedule: [{{at: 5 s, rate: x%}}]\n", "schedule[0].rate: 'x%': expected a part of the link's own rate"),
        (f"{TWO}schedule: [{{at: 5 s, rate: 0%}}]\n", "net.yaml:3: schedule[0].rate: 0 %: expected a positive rate"),
        (f"{TWO}schedule: [{{at: 5 s, rate: {{from: 1 bps}}}}]\n", "schedule[0].rate: a random rate needs both bounds"),
        (f"{TWO}schedule: [{{every: 0 s, state: cut}}]\n", "schedule[0].every: 0: expected a positive duration"),
        (f"{TWO}schedule: [{{every: 1 s, state: cut, seed: x}}]\n", "schedule[0].seed: 'x': expected a whole number"),
        (f"{TWO}schedule: [{{at: 5 s, link: a, state: cut}}]\n", "schedule[0].link: 'a'; expected the two ends"),
        (f"{TWO}schedule: {{at: 5 s}}\n", "net.yaml:3: schedule: a mapping; expected a list"),
        ("nodes: [[[[[[[[[[a]]]]]]]]]]\n", "nested more than 8 deep"),
        ("nodes: &n [*n]\n", "net.yaml:1: an anchor that contains itself"),
        ("? [a]\n: b\n", "net.yaml:1: a key is a list or mapping"),
    ],
)
def test_mistakes_are_named_by_their_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_topology(written(tmp_path, text))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"nodes": ["a"]', "net.json:1: no JSON: "),
        ('{"nodes": ["a"], "nodes": ["b"]}', "key 'nodes' is there twice"),
        (
            '{"nodes": ["a", 5], "links": [{"between": ["a", "5"], "rate": 300}]}',
            "links[0].rate: '300': expected a rate",
        ),
        ("7", "net.json: '7'; expected the keys"),
    ],
)
def test_mistakes_in_json_are_named_by_their_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_topology(written(tmp_path, text, "net.json"))
    assert words in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigurationError, match=r"topology file .* cannot be read"):
            load_topology(path)
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"topology file .* cannot be read"):
        load_topology(tmp_path / "odd.yaml")


def test_units() -> None:
    rates: dict[str, Any] = {"5 bps": 5, "64kbps": 64e3, "1.5 Mbit/s": 1.5e6, "2 gbps": 2e9, "1e2 Mbps": 1e8}
    assert {text: rate_bps(text) for text in rates} == rates
    durations = {"20 ms": 0.02, "5us": 5e-6, "3 min": 180, "1 h": 3600, "2.5 s": 2.5, "0": 0}
    assert {text: pytest.approx(seconds(text)) for text in durations} == durations
    for text in ("", "Mbps", "1,5 Mbps", "1 Mb", "inf Mbps"):
        with pytest.raises(ValueError, match="expected a rate"):
            rate_bps(text)
    for text in ("", "5", "5 m", "1:30", "nan s"):
        with pytest.raises(ValueError, match="expected a time"):
            seconds(text)
