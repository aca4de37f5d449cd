"""Tests how strategies take the setting `notice`, and who is told that a part of it is not honoured."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import strategy_models as models

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.strategies import ChaosStrategy, DiLoCoStrategy


def test_ranks_of_a_cluster_follow_the_clusters_notices() -> None:
    strategy: Any = DiLoCoStrategy(inner="chaos", name="west", options={"notice": "aws"})
    assert strategy._config().notice == "aws"
    inner = ChaosStrategy(options={"notice": "gcp"})
    both: Any = DiLoCoStrategy(inner=inner, name="west", options={"notice": "aws"})
    assert both._config().notice == "gcp"
    assert DiLoCoStrategy(inner="chaos", name="west")._config().notice == ""  # type: ignore[attr-defined]


def test_the_environments_notices_are_a_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOS_NOTICE", "aws")
    strategy: Any = DiLoCoStrategy(inner="chaos", name="west")
    assert (strategy._config().notice, strategy.outer.cluster.notice) == ("aws", "aws")


def test_a_wrong_notice_is_refused_before_anything_starts(tmp_path: Path) -> None:
    strategy = ChaosStrategy(options={"notice": "azure"})
    with pytest.raises(ConfigurationError, match="notice='azure': 'azure' is no source of notices"):
        models.trainer(tmp_path, strategy=strategy).fit(models.Regression(), models.loader())


@pytest.mark.usefixtures("double")
def test_a_grace_time_that_nobody_follows_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"notice": "sigterm:30s", "leave_on_signals": False}
    with caplog.at_level(logging.WARNING):
        models.fitted(
            tmp_path, models.Regression(), models.loader(), strategy=ChaosStrategy(options=options), max_epochs=1
        )
    assert "notice=sigterm:30s: sigterm is not honoured, as leave_on_signals is off" in caplog.text
