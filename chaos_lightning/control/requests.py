"""Single calls to a scheduler: its status, and what operators ask of it."""

from __future__ import annotations

import json
from typing import Any, cast

from chaos_lightning.control.service_pb2_grpc import SchedulerStub
from chaos_lightning.errors import RefusedError
from chaos_lightning.protocol import chaos_pb2
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.channel import ask_leader, facts_of_leader

WHAT = "scheduler"
SERVICE = "chaos_lightning.v1.Scheduler"
"""Full name of the service, as in control/service.proto."""


def _ask(endpoint: str, token: Secret, timeout_s: float, method: str, request: Any) -> Any:
    return ask_leader(endpoint, token, timeout_s, method, request, stub=SchedulerStub, what=WHAT)


def fetch_status(
    endpoint: str, token: Secret = b"", timeout_s: float = 5.0, *, follow: bool = True, page: int = 0
) -> dict[str, Any]:
    """Returns a scheduler's status as a dictionary (see SchedulerServer.status).

    Args:
        endpoint: HOST:PORT, or several with commas: the first one that answers, unless another one leads.
        token: Cluster token, or credentials.
        timeout_s: Seconds for the whole call, all servers together.
        follow: Ask the scheduler that leads, if it is another one and answers. A standby that does not know who leads,
            or names one that is gone, is no reason to stop: the others are asked, too.
        page: Page of a large job's members, from 1 on; 0: counts, and what is not as it should be.

    Raises:
        SchedulerUnreachableError: No scheduler answered in time.
        RefusedError: The server that answered does not accept the credentials (or we not its), or is no scheduler.
    """

    def status(place: str, left_s: float) -> dict[str, Any]:
        reply = _ask(place, token, left_s, "Status", chaos_pb2.StatusRequest(page=page))
        return cast(dict[str, Any], json.loads(reply.json))

    return facts_of_leader(status, endpoint, timeout_s) if follow else status(endpoint, timeout_s)


def fetch_all(endpoint: str, token: Secret = b"", timeout_s: float = 5.0, *, follow: bool = True) -> dict[str, Any]:
    """Returns a scheduler's status with all members and links, which a large job reports in pages; each page may take
    `timeout_s`.
    """
    facts = fetch_status(endpoint, token, timeout_s, follow=follow)
    pages = int(facts.get("machine", {}).get("pages", 0))
    if not pages:
        return facts
    found = [fetch_status(endpoint, token, timeout_s, follow=follow, page=page) for page in range(1, pages + 1)]
    rows = {
        key: [row for one in found for row in one["machine"].get(key, ())] for key in ("members", "others", "links")
    }
    return {**facts, "streams": found[0]["streams"], "machine": {**facts["machine"], **rows, "pages": 0}}


def drain(endpoint: str, name: str, token: Secret = b"", timeout_s: float = 5.0) -> tuple[str, ...]:
    """Asks the scheduler to let a member, or all members of a node, leave; returns their names.

    Raises:
        RefusedError: There is no such member; the message lists those present.
        SchedulerUnreachableError: No scheduler answered in time.
    """
    reply = _ask(endpoint, token, timeout_s, "Drain", chaos_pb2.DrainRequest(name=name))
    if not reply.asked:
        present = ", ".join(reply.present) or "none"
        raise RefusedError(f"no member or node is called {name!r}; present: {present}")
    return tuple(reply.asked)


def change_link(endpoint: str, a: str, b: str, *, add: bool, token: Secret = b"", timeout_s: float = 5.0) -> str:
    """Asks the scheduler to add or remove a link between two members; returns its answer.

    Raises:
        RefusedError: The link cannot be changed; the message says why.
        SchedulerUnreachableError: No scheduler answered in time.
    """
    return _granted(_ask(endpoint, token, timeout_s, "ChangeLink", chaos_pb2.LinkChangeRequest(a=a, b=b, add=add)))


def reset(endpoint: str, *, force: bool = False, token: Secret = b"", timeout_s: float = 10.0) -> str:
    """Asks a scheduler to end its job; returns its answer, which says what was ended.

    Raises:
        RefusedError: The job cannot be ended; the message says why.
        SchedulerUnreachableError: No scheduler answered in time.
    """
    return _granted(_ask(endpoint, token, timeout_s, "Reset", chaos_pb2.ResetRequest(force=force)))


def _granted(reply: Any) -> str:
    """Returns the text of a scheduler's answer if it accepted the request.

    Raises:
        RefusedError: The scheduler refused the request.
    """
    if not reply.accepted:
        raise RefusedError(str(reply.text))
    return str(reply.text)
