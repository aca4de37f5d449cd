"""Who may ask the scheduler for what: one table.

A role stands in the caller's certificate (security/keyfiles.py), as `chaos-lightning://CLUSTER/ROLE/NAME` among its
names. Where there are no certificates, whoever knows the cluster token, or without one whoever is on this machine, may
do everything. What is not in the table is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from chaos_lightning.errors import WireError

SCHEME = "chaos-lightning"
MEMBER = "member"
OBSERVER = "observer"
OPERATOR = "operator"
TOKEN = "token"
"""Not a certificate's role: shows the token of a cluster without certificates."""
ANYBODY = "anybody"
"""Not a certificate's role: a cluster without credentials, on loopback only."""

CERTIFIED = (MEMBER, OBSERVER, OPERATOR)
"""Roles that a certificate may name."""

ATTEND, STATUS, DRAIN, CHANGE_LINK, RESET, CLAIM = "Attend", "Status", "Drain", "ChangeLink", "Reset", "Claim"
ALL = frozenset((ATTEND, STATUS, DRAIN, CHANGE_LINK, RESET, CLAIM))
"""The calls of chaos.proto."""

MAY: dict[str, frozenset[str]] = {
    MEMBER: frozenset((ATTEND, STATUS, CLAIM)),
    OBSERVER: frozenset((STATUS,)),
    OPERATOR: frozenset((STATUS, DRAIN, CHANGE_LINK, RESET)),
    TOKEN: ALL,
    ANYBODY: ALL,
}
TOKEN_DEMANDED: dict[str, frozenset[str]] = {MEMBER: frozenset((ATTEND, CLAIM)), TOKEN: ALL}
"""Calls that need the token besides. Members prove it to each other, so who attends must know it; observers and
operators are not given it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by its certificate.

    Attributes:
        name: Node or person that the certificate was made for.
        role: One of CERTIFIED.
        peer: Address and port, as gRPC writes them.
    """

    name: str
    role: str
    peer: str

    def __str__(self) -> str:
        return f"{self.peer} {self.name} ({self.role})"


def may(role: str, call: str) -> bool:
    """Whether `role` may make `call`."""
    return call in MAY.get(role, frozenset())


def who_may(call: str) -> str:
    """The certified roles that may, in words."""
    return " or ".join(role for role in CERTIFIED if may(role, call)) or "nobody"


def uri(cluster: str, role: str, name: str) -> str:
    """What a certificate carries."""
    return f"{SCHEME}://{cluster}/{role}/{name}"


def read_uris(uris: list[str]) -> tuple[str, str]:
    """(role, name) of a certificate with these URIs.

    Raises:
        WireError: There is none of ours, more than one, or a role that nobody knows.
    """
    ours = [found for found in uris if found.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        raise WireError(f"its certificate names {len(ours)} roles, expected one; make it with `chaos-lightning keys`")
    parts = ours[0].removeprefix(f"{SCHEME}://").split("/")
    if len(parts) != 3 or parts[1] not in CERTIFIED or not parts[2]:
        raise WireError(f"its certificate says {ours[0]!r}; expected one of the roles {', '.join(CERTIFIED)}")
    return parts[1], parts[2]
