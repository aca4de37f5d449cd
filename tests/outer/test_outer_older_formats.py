"""Tests that the saved state of an elastic cluster, if another release wrote it, gives an error that names it and is
not used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outer_cluster_support import Clusters

from chaos_lightning.errors import StateError
from chaos_lightning.outer.cluster import elastic
from chaos_lightning.outer.cluster.elastic import NewcomerFacts
from chaos_lightning.outer.rules.types import NO_VERSION
from chaos_lightning.protocol.plain import text_of
from chaos_lightning.replication import kept

HEAD = "0123456789abcdef"


def test_a_state_of_an_older_format_is_refused_with_both_formats_and_left_as_it_is(
    clusters: Clusters, tmp_path: Path
) -> None:
    ranks, folder = clusters.elastic("ranks"), tmp_path / "kept"
    kept.write(folder, HEAD, 1, ranks.cluster, {})
    record = folder / kept.RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 0}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(StateError, match=r"kept\.json has version 0, this release reads 1"):
        kept.read(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_an_older_release_kept_of_a_clusters_part_is_no_state(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older release's file has no format number of its own, and lacks a field."""

    def with_less(hint: Any, value: Any) -> bytes:
        text = text_of(hint, value)
        return json.dumps(json.loads(text)[:-1]).encode() if hint is NewcomerFacts else text

    ranks, others = clusters.elastic("ranks"), clusters.elastic("others")
    state, base = others.cluster.state, others.cluster.base
    written: dict[str, Callable[..., bytes]] = {"older": with_less, "own": text_of}
    records = {}
    for name, words in written.items():
        monkeypatch.setattr(elastic, "text_of", words)
        records[name] = kept.write(tmp_path / name, HEAD, 1, ranks.cluster, {})
    with pytest.raises(StateError, match=r"is not what was kept: .* should be a NewcomerFacts are malformed"):
        kept.load(records["older"], others.cluster)
    assert (others.cluster.state, others.cluster.base) == (state, base)
    kept.load(records["own"], others.cluster)
    assert others.cluster.base == ranks.cluster.base != NO_VERSION
