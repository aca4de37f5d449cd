"""The words by which links get their keys. The state machines never see them (control/link_keys.py, keyring.py)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LinkKey:
    """A key that two members share. `name` is no secret, and the same at both."""

    peer: str
    """Member id of the other end."""
    name: str
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """How links are protected in this job, and new keys of the receiver's own links; older ones hold until void."""

    rule: str
    """The job's setting `links`."""
    remote: str
    """The least protection (transport/sealing.py, Level) of a link between machines."""
    local: str
    """The same within a machine."""
    keyed: bool
    """Links have keys: whoever knows none of them is a stranger, at any level."""
    keys: tuple[LinkKey, ...] = ()
    void: tuple[str, ...] = ()
    """Members that are gone."""
