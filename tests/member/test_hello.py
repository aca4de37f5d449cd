"""What a member says of itself."""

from __future__ import annotations

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine import addresses
from chaos_lightning.member.hello import reachable_address
from chaos_lightning.settings import EngineConfig


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "localhost:1", "[::1]:1"])
def test_a_member_that_listens_everywhere_names_the_address_that_faces_its_scheduler(endpoint: str) -> None:
    assert reachable_address(EngineConfig(endpoint=endpoint, bind="0.0.0.0")) == "127.0.0.1"


def test_a_member_that_others_could_not_dial_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "addresses", lambda host: ("2001:db8::1",))
    monkeypatch.setattr(addresses, "_source", lambda address, port: "2001:db8::7")
    with pytest.raises(ConfigurationError, match=r"2001:db8::7 faces the scheduler at \[2001:db8::1\]:1.*set bind"):
        reachable_address(EngineConfig(endpoint="[2001:db8::1]:1", bind="0.0.0.0"))
