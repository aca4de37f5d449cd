"""Tests that transfer policies get the facts from which they plan."""

from __future__ import annotations

import pytest

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.member.choice import TransferChoice
from chaos_lightning.replication import Job, PolicyOptions, TransferPolicy
from chaos_lightning.replication.policies import Adaptive
from chaos_lightning.settings import EngineConfig


@pytest.mark.parametrize(("ingress_bps", "held"), [(0.0, False), (1e8, True), (1e10, False)])
def test_adaptive_plans_by_the_newcomers_own_access(ingress_bps: float, held: bool) -> None:
    choice = TransferChoice.of(EngineConfig(ingress_bps=ingress_bps))
    assert choice.policy is Adaptive
    options = PolicyOptions(ingress_bps=choice.ingress_bps)
    policy = choice.policy({"a": (0.01, 1e8), "b": (0.01, 3e8)}, options)
    plan = policy.assign([Job(at, at + 100_000) for at in range(0, 2_000_000, 100_000)], ["a", "b"])
    assert ("held back by the newcomer's own 100 Mbps" in plan.reason) == held, plan.reason


def test_a_policy_is_looked_up_when_a_member_is_made() -> None:
    assert TransferChoice.of(EngineConfig(transfer="shared")).policy is TransferPolicy
    with pytest.raises(ConfigurationError, match="transfer policy 'no_such:Policy' cannot be loaded"):
        TransferChoice.of(EngineConfig(transfer="no_such:Policy"))
