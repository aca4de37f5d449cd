"""Tests the comparison of torchmetrics, kept in various places of a model, between jobs of several members and one
process.
"""

from __future__ import annotations

from pathlib import Path

import compat_features
import compat_metrics
import pytest


@pytest.mark.slow
def test_every_place_is_equal_to_one_process_and_ddp_or_ends_by_name(tmp_path: Path) -> None:
    found = compat_features.rows(tmp_path, 550.0, table="compat_metrics", worlds=(2,))
    assert len(found) == len(compat_metrics.FEATURES)
    assert [f"{row.feature.name}: {row.words}" for row in found if not row.held] == []
