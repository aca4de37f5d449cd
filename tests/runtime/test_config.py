"""Settings of a member that cannot work are refused by name."""

import math

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.runtime.config import EngineConfig


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["heartbeat_timeout_s", "join_timeout_s", "step_timeout_s"])
def test_a_wait_without_duration_or_end_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} {value}: expected a positive number of seconds"):
        EngineConfig(**{name: value})
    with pytest.raises(ConfigurationError, match=f"^{name} "):
        EngineConfig.build({}, {f"CHAOS_{name.upper()}": str(value)})


def test_hashes_are_compared_never_or_every_so_many_steps() -> None:
    with pytest.raises(ConfigurationError, match=r"^state_hash_every -1: expected a number of steps, or 0 for never"):
        EngineConfig(state_hash_every=-1)
    assert EngineConfig(state_hash_every=0).state_hash_every == 0


@pytest.mark.parametrize(("text", "words"), [("b,a", "'a' is this member itself"), ("b,c d/e", "'d/e' is no node's")])
def test_neighbours_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^neighbours '{text}': {words}"):
        EngineConfig(name="a", neighbours=text)
    assert EngineConfig(name="a", neighbours="b, c+d").neighbour_names == ("b", "c", "d")
