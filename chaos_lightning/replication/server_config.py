"""Waits and limits of the serving side."""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.replication.log import DEFAULT_CAP_NBYTES


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Waits of the serving side, in seconds."""

    publish_timeout_s: float = 30.0
    """How long a request waits for a header that this member has yet to commit."""
    idle_timeout_s: float = 120.0
    """A connection without a request for so long is closed."""
    stall_timeout_s: float = 10.0
    """A peer that neither sends nor takes a byte for so long in mid-frame is given up."""
    pending_interval_s: float = 0.25
    """How often a waiting peer is told that this donor lives."""
    snapshot_cap_nbytes: int = 0
    """A larger state is not copied for learners; 0: half of the memory that is available then, shared by the members
    of this machine."""
    log_cap_nbytes: int = DEFAULT_CAP_NBYTES
    lease_s: float = 600.0
    """A snapshot nobody asked anything of for so long is given up."""
    results_kept: int = 2
    """Reduced slots kept servable: the last one, and the one before until everybody is known to hold the last."""

    def __post_init__(self) -> None:
        for name in ("publish_timeout_s", "idle_timeout_s", "stall_timeout_s", "pending_interval_s", "lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.results_kept < 1:
            raise ValueError(f"results_kept must be at least 1, got {self.results_kept}")
