"""Tests that settings of a member that cannot work are refused by name."""

import math
import re
from typing import Any

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.settings import EngineConfig


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["heartbeat_timeout_s", "join_timeout_s", "step_timeout_s"])
def test_a_wait_without_duration_or_end_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name}={value}: expected a positive number of seconds"):
        EngineConfig(**{name: value})
    with pytest.raises(ConfigurationError, match=f"^{name}="):
        EngineConfig.build({}, {f"CHAOS_{name.upper()}": str(value)})


def test_hashes_are_compared_never_or_every_so_many_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"^state_hash_every=-1: expected a number of steps, or 0 for never"):
        EngineConfig(state_hash_every=-1)
    assert EngineConfig(state_hash_every=0).state_hash_every == 0


@pytest.mark.parametrize(("text", "words"), [("b,a", "'a' is this member itself"), ("b,c d/e", "'d/e' is no node's")])
def test_neighbours_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^neighbours='{text}': {words}"):
        EngineConfig(name="a", neighbours=text)
    assert EngineConfig(name="a", neighbours="b, c+d").neighbour_names == ("b", "c", "d")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfer": "fast"}, "transfer='fast': expected one of adaptive, shared, or MODULE:CLASS"),
        ({"ingress_bps": -1.0}, "ingress_bps=-1.0: expected bits per second"),
        ({"ingress_bps": math.inf}, "ingress_bps=inf: expected bits per second"),
        (
            {"transfer": "stop_resume"},
            "transfer='stop_resume': not in the package, since it is only there to be compared",
        ),
    ],
)
def test_transfers_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(words)}"):
        EngineConfig(**settings)
