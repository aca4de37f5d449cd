"""Roles that certificates may name, and which role may make which call.

Theory of operation. A role stands in the caller's certificate (security/keyfiles.py), as
`chaos-lightning://CLUSTER/ROLE/NAME` among its names. Which roles there are is not written here: whoever needs one
registers it (`register_role`). Likewise each service that a server offers says who may make its calls (`Right`), and
registers with `Rights`, of which a server has one. What nobody has registered is refused. Where there are no
certificates, whoever knows the cluster token, or without one whoever is on this machine, may do everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chaos_lightning.errors import WireError

SCHEME = "chaos-lightning"
TOKEN = "token"
"""Role of a caller that shows the token of a cluster without certificates; no certificate has it."""
ANYBODY = "anybody"
"""Role of any caller in a cluster without credentials, on loopback only; no certificate has it."""

_SERVES: dict[str, bool] = {}
"""Roles that there are, and whether others call nodes of each."""
_SHOW_TOKEN: set[str] = set()
"""Roles that others do not call, and that prove the token all the same."""


def register_role(name: str, *, serves: bool = False, token: bool = False) -> str:
    """Registers a role, so that certificates may name it; returns its name.

    Args:
        name: A plain word in lower case.
        serves: Others call who has it: its certificate is made for hosts, and the cluster's token lies beside it.
        token: The token lies beside it although nobody calls it: it proves the token when it dials others.

    Raises:
        ValueError: The name cannot be one, or is another role's.
    """
    if not (name.isascii() and name.isidentifier() and name.islower()) or name in (TOKEN, ANYBODY):
        raise ValueError(f"role {name!r}: expected a plain word in lower case, and neither {TOKEN} nor {ANYBODY}")
    if _SERVES.setdefault(name, serves) is not serves:
        raise ValueError(f"role {name!r} is registered as one that {'serves' if _SERVES[name] else 'does not serve'}")
    if token:
        _SHOW_TOKEN.add(name)
    return name


def certified() -> tuple[str, ...]:
    """Returns all registered roles, which certificates may name."""
    return tuple(_SERVES)


def serves(role: str) -> bool:
    """Returns whether nodes of this role are servers, which others call."""
    return _SERVES.get(role, False)


def shows_token(role: str) -> bool:
    """Returns whether nodes of this role get the cluster's token along with their certificate."""
    return serves(role) or role in _SHOW_TOKEN


MEMBER = register_role("member", serves=True)
OBSERVER = register_role("observer")
OPERATOR = register_role("operator")
FOLLOWER = register_role("follower", serves=True)
"""Role of a node that runs a parameter server, or a part of one."""
CLUSTER = register_role("cluster", token=True)
"""Role of a node that trains with a parameter server, and only dials: it cannot pass for one."""


@dataclass(frozen=True, slots=True)
class Right:
    """Roles that may make a call.

    Attributes:
        roles: Roles that may make the call.
        with_token: Roles of these that must show the cluster token besides.
    """

    roles: tuple[str, ...]
    with_token: tuple[str, ...] = ()


class Rights:
    """Which roles may make which calls, for all services of one server."""

    def __init__(self) -> None:
        self._rights: dict[str, Right] = {}

    def register(self, service: str, calls: Mapping[str, Right]) -> None:
        """Registers which roles may make the calls of a service.

        Args:
            service: Full name of the service, as in its .proto.
            calls: Rights by name of the call in the .proto.

        Raises:
            ValueError: A call is registered already, or a right names a role that is not registered.
        """
        for call, right in calls.items():
            if unknown := [role for role in (*right.roles, *right.with_token) if role not in _SERVES]:
                raise ValueError(f"{service}/{call}: no role {', '.join(unknown)} is registered")
            if f"/{service}/{call}" in self._rights:
                raise ValueError(f"{service}/{call} is registered already")
            self._rights[f"/{service}/{call}"] = right

    def may(self, role: str, method: str) -> bool:
        """Returns whether `role` may make the call with this path (/SERVICE/CALL)."""
        right = self._rights.get(method)
        return right is not None and (role in right.roles or role in (TOKEN, ANYBODY))

    def must_show_token(self, role: str, method: str) -> bool:
        """Returns whether `role` must show the cluster token for the call with this path."""
        right = self._rights.get(method)
        return role == TOKEN or (right is not None and role in right.with_token)

    def who_may(self, method: str) -> str:
        """Returns the roles that may make this call, as text."""
        return " or ".join(role for role in _SERVES if self.may(role, method)) or "nobody"


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller of a gRPC call, as its certificate names it.

    Attributes:
        name: Node or person that the certificate was made for.
        role: A registered one.
        peer: Address and port, as gRPC writes them.
    """

    name: str
    role: str
    peer: str

    def __str__(self) -> str:
        return f"{self.peer} {self.name} ({self.role})"


def uri(cluster: str, role: str, name: str) -> str:
    """Returns the URI that a certificate carries for a node: cluster, role and name."""
    return f"{SCHEME}://{cluster}/{role}/{name}"


def read_uris(uris: list[str]) -> tuple[str, str]:
    """Returns role and name from the URIs in a certificate.

    Raises:
        WireError: There is none of ours, more than one, or a role that nobody knows.
    """
    ours = [found for found in uris if found.startswith(f"{SCHEME}://")]
    if len(ours) != 1:
        raise WireError(f"its certificate names {len(ours)} roles, expected one; make it with `chaos-lightning keys`")
    parts = ours[0].removeprefix(f"{SCHEME}://").split("/")
    if len(parts) != 3 or parts[1] not in _SERVES or not parts[2]:
        raise WireError(f"its certificate says {ours[0]!r}; expected one of the roles {', '.join(_SERVES)}")
    return parts[1], parts[2]
