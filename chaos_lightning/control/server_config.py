"""How a scheduler's shell behaves, beside the job's rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Secret


@dataclass(frozen=True)
class Owed:
    """The end of a job that its store has not taken yet.

    Attributes:
        effect: What is to be appended.
        chain: Id of the chain that it ends.
        view: The chain's last view, as text.
        reason: Why the store has not taken it.
    """

    effect: Persist
    chain: str
    view: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the shell behaves; the job's rules are in `settings`.

    Attributes:
        host: Address to listen on.
        port: Port; 0 takes a free one.
        advertise: HOST:PORT that others are told to reach it at; "" for where it listens.
        token: Cluster token, or credentials with a folder of keys; b"" only on loopback.
        settings: Rules of the job.
        tick_s: Seconds between ticks of the machine; 0 for a quarter of the heartbeat interval, 10 to 50 ms.
        idle_timeout_s: End after so long without any member's stream; 0 never.
        rebuild: The chain is lost: begin it anew from what members report (PROTOCOL.md 14a).
        gives_way: It was started by a member, on a store that may not be the job's: it ends where members know
            what the store lacks and none of its own is here, so that one on the right store can have the endpoint.
        hello_timeout_s: A stream that has said no Hello by then is closed: it takes a place of somebody who would.
        owed: What this process could not write down when it led last.
        linger_s: How long a finished scheduler goes on answering while streams are open.
    """

    host: str = "127.0.0.1"
    port: int = 29400
    advertise: str = ""
    token: Secret = field(default=b"", repr=False)
    settings: Settings = field(default_factory=Settings)
    tick_s: float = 0.0
    idle_timeout_s: float = 0.0
    hello_timeout_s: float = 5.0
    linger_s: float = 5.0
    rebuild: bool = False
    gives_way: bool = False
    owed: Owed | None = None


__all__ = ["Owed", "ServerConfig"]
