"""How a cluster limits the rate at which it sends its pushes while training goes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from chaos_lightning.outer.cluster import push_serving
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.push_serving import PushServing
from chaos_lightning.outer.exchange.codec import BF16, Part
from chaos_lightning.outer.exchange.lines import ParkedLines
from chaos_lightning.outer.rules.grid import Grid


@pytest.mark.parametrize(
    ("sizes", "nbytes"),
    [((1 << 20,), (1 << 21) + 88), ((2,) * 4000, 16_000 + 88 * 4000)],
    ids=["one tensor", "many small tensors"],
)
def test_a_push_is_spread_with_what_tells_about_its_tensors(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], nbytes: int
) -> None:
    """Former bug: the sending rate was computed without a push's table of tensors; for 16,000 small tensors that is
    twenty times the data, so that a push took eight seconds.
    """
    grid = Grid(sizes)
    part = Part.encoded(grid.whole, BF16, torch.zeros(grid.elements))
    told: list[float] = []
    monkeypatch.setattr(ParkedLines, "spread", lambda lines, rate_bps: told.append(rate_bps))
    options = ClusterOptions(name="home", server="127.0.0.1:1", spread=0.5)
    serving = PushServing(options, b"", grid, lambda: "home~1", lambda *given, **fields: None)
    for now in (10.0, 12.0):
        monkeypatch.setattr(push_serving, "time", SimpleNamespace(monotonic=lambda now=now: now))
        serving._spread_over(part)
    monkeypatch.undo()
    serving.close()
    assert told == [8.0 * nbytes / (0.5 * 2.0)]
