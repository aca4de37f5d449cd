"""Makes a cluster's keys for `chaos-lightning keys`: an authority, a token, and a folder of keys for each node.

Theory of operation. The owner's folder holds `cluster.json` with everything secret (the authority's key, the token, who
was given what) and `nodes/NAME/`, one folder per node, to be copied there: `ca.crt` (whom to believe), `node.crt` and
`node.key` (who this is), and for roles that prove it `token`. These are made from `cluster.json`.

A rotation has two halves, and between them folders may arrive at the nodes in any order, while the job trains. The
first makes a new authority, token and certificates. Nodes that have them believe both authorities and know both tokens;
nodes that do not have them yet believe the new certificates all the same, because the old authority has signed the new
one and that signature travels with each certificate. The old authority's key is gone from then on. The second half
(`finish`) takes the old authority and token out of all folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.protocol.types import NAME
from chaos_lightning.security.certificates import (
    AUTHORITY_DAYS,
    NODE_DAYS,
    Facts,
    bridge,
    certify,
    facts_of,
    first_of,
    host_name,
    new_authority,
    signed_by,
)
from chaos_lightning.security.roles import MEMBER, OPERATOR, certified, serves, shows_token

CLUSTER = "cluster.json"
NODES = "nodes"
TRUSTED, CHAIN, KEY, TOKEN = "ca.crt", "node.crt", "node.key", "token"
"""Files of a node's folder; `token` only where the role shows it."""
FORMAT = 1


@dataclass(frozen=True)
class KeyHolder:
    """Node or person that has a certificate.

    Attributes:
        name: Unique in the cluster.
        role: A registered one (roles.register_role).
        hosts: Names and addresses where others reach a scheduler that runs there.
    """

    name: str
    role: str = MEMBER
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"node {self.name!r} may have up to 64 letters, digits, dots, dashes and underscores"
            )
        if self.name in (".", ".."):
            raise ConfigurationError(f"node {self.name!r} names a folder; choose another name")
        if self.role not in certified():
            raise ConfigurationError(f"role {self.role!r} of {self.name}: expected one of {', '.join(certified())}")
        for host in self.hosts:
            host_name(host)
        if self.hosts and not serves(self.role):
            raise ConfigurationError(
                f"{self.name} is {self.role} and serves nothing: leave out ={','.join(self.hosts)}, or make it a member"
            )

    @classmethod
    def read(cls, text: str, role: str = MEMBER) -> KeyHolder:
        """Parses "NAME" or "NAME=HOST,ADDRESS,..."."""
        name, equals, hosts = text.partition("=")
        found = tuple(dict.fromkeys(h.strip() for h in hosts.split(",") if h.strip()))
        if equals and not found:
            raise ConfigurationError(f"node {text!r}: expected NAME=HOST,ADDRESS,... or NAME alone")
        return cls(name.strip(), role, found)


# ------------------------------------------------------------------------------------------------ the authority


@dataclass(frozen=True)
class Cluster:
    """A cluster's authority, tokens and nodes, as stored in `cluster.json`. Secrets stay out of `repr`.

    Attributes:
        name: Name of the cluster, for people.
        authority: Certificate (PEM) and key (PEM) that sign the nodes' certificates.
        old_authority: Old authority's certificate, which is still trusted; "" outside of a rotation.
        bridge: The authority's certificate, signed by the old one.
        tokens: Cluster token; during a rotation followed by the old one.
        nodes: Nodes and persons that were given keys.
    """

    name: str
    authority: tuple[str, str] = field(repr=False)
    old_authority: str = ""
    bridge: str = ""
    tokens: tuple[str, ...] = field(default=(), repr=False)
    nodes: tuple[KeyHolder, ...] = ()
    format: int = FORMAT

    @property
    def rotating(self) -> bool:
        """Whether a rotation has begun and is not finished."""
        return bool(self.old_authority) or len(self.tokens) > 1

    def node(self, name: str) -> KeyHolder | None:
        return next((n for n in self.nodes if n.name == name), None)


def issue(cluster: Cluster, node: KeyHolder, days: float = NODE_DAYS) -> dict[str, str]:
    """Makes a key and certificate for a node; returns the files for its folder."""
    certificate, key = certify(cluster.authority, cluster.name, node.name, node.role, node.hosts, days)
    files = {TRUSTED: cluster.authority[0] + cluster.old_authority, CHAIN: certificate + cluster.bridge, KEY: key}
    if shows_token(node.role):
        files[TOKEN] = "".join(f"{token}\n" for token in cluster.tokens)
    return files


# ------------------------------------------------------------------------------------------------ files


def _write(path: Path, text: str) -> None:
    """Writes a file atomically, readable only by this user."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def _hand_out(folder: Path, cluster: Cluster, nodes: Iterable[KeyHolder], days: float) -> None:
    for node in nodes:
        there = _folder(_folder(folder / NODES) / node.name)
        for name, text in issue(cluster, node, days).items():
            _write(there / name, text)


def save(folder: Path, cluster: Cluster) -> None:
    """Writes a cluster's `cluster.json`."""
    _write(folder / CLUSTER, json.dumps(asdict(cluster), indent=1) + "\n")


def load(folder: Path) -> Cluster:
    """Reads a cluster from the folder that `init` has made.

    Raises:
        ConfigurationError: There is no such folder, or `cluster.json` is damaged.
    """
    path = folder / CLUSTER
    try:
        given: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error.strerror}); give the folder that `chaos-lightning keys init --dir` has made"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}); take it from a copy, or begin with `keys init`"
        ) from error
    try:
        if given["format"] != FORMAT:
            raise ConfigurationError(f"{path} has format {given['format']}, this version knows {FORMAT}")
        nodes = tuple(KeyHolder(n["name"], n["role"], tuple(n["hosts"])) for n in given["nodes"])
        certificate, key = given["authority"]
        return Cluster(
            given["name"],
            (certificate, key),
            given["old_authority"],
            given["bridge"],
            tuple(given["tokens"]),
            nodes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------ what one may ask for


def init(folder: Path, nodes: Iterable[KeyHolder], *, name: str = "cluster", days: float = NODE_DAYS) -> Cluster:
    """Makes the keys of a new cluster, including an operator's, if none is given.

    Raises:
        ConfigurationError: The folder is not empty, or two nodes have one name.
    """
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"cluster {name!r} may have up to 64 letters, digits, dots, dashes and underscores")
    given = list(nodes)
    if not any(n.role == OPERATOR for n in given):
        given.append(KeyHolder(OPERATOR, OPERATOR))
    twice = sorted({n.name for n in given if [m.name for m in given].count(n.name) > 1})
    if twice:
        raise ConfigurationError(f"node {', '.join(twice)} is given twice")
    _check_days(days)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder} exists and is not empty; nothing is overwritten: give another --dir, or see `keys node` and "
            "`keys rotate`"
        )
    cluster = Cluster(name, new_authority(name), tokens=(secrets.token_urlsafe(32),), nodes=tuple(given))
    save(_folder(folder), cluster)
    _hand_out(folder, cluster, given, days)
    return cluster


def add(folder: Path, node: KeyHolder, *, days: float = NODE_DAYS, renew: bool = False) -> Path:
    """Makes keys for one more node, or with `renew` new keys for a known one; returns their folder.

    Raises:
        ConfigurationError: There is such a node and it is not to be renewed, or there is none and it is.
    """
    _check_days(days)
    cluster = load(folder)
    known = cluster.node(node.name)
    if renew:
        if known is None:
            names = ", ".join(n.name for n in cluster.nodes)
            raise ConfigurationError(f"no node is called {node.name!r}; there are {names}")
        if known.role != node.role:
            raise ConfigurationError(f"{node.name} is {known.role}; a {node.role} needs another name")
        node = replace(known, hosts=node.hosts or known.hosts)
    elif known is not None:
        raise ConfigurationError(
            f"{node.name} has keys (as {known.role}) and nothing is overwritten: choose another name, or --renew them"
        )
    nodes = (*(n for n in cluster.nodes if n.name != node.name), node)
    cluster = replace(cluster, nodes=nodes)
    save(folder, cluster)
    _hand_out(folder, cluster, (node,), days)
    return folder / NODES / node.name


def rotate(folder: Path, *, without: Iterable[str] = (), days: float = NODE_DAYS) -> Cluster:
    """Begins a rotation: makes a new authority, token and certificates; the old ones stay valid until `finish`.

    Args:
        folder: Folder of the cluster's owner.
        without: Nodes that get no new keys: after `finish` they are out.
        days: Days for which the new certificates are valid.

    Raises:
        ConfigurationError: A rotation is under way, or there is no such node.
    """
    _check_days(days)
    cluster = load(folder)
    if cluster.rotating:
        raise ConfigurationError(
            "a rotation is under way: copy all folders to their nodes, then `chaos-lightning keys rotate --finish`"
        )
    left_out = set(without)
    unknown = sorted(left_out - {n.name for n in cluster.nodes})
    if unknown:
        raise ConfigurationError(
            f"no node is called {', '.join(unknown)}; there are {', '.join(n.name for n in cluster.nodes)}"
        )
    authority = new_authority(cluster.name)
    turned = replace(
        cluster,
        authority=authority,
        old_authority=cluster.authority[0],
        bridge=bridge(authority, cluster.authority),
        tokens=(secrets.token_urlsafe(32), *cluster.tokens),
        nodes=tuple(n for n in cluster.nodes if n.name not in left_out),
    )
    save(folder, turned)
    for name in left_out:
        shutil.rmtree(folder / NODES / name, ignore_errors=True)
    _hand_out(folder, turned, turned.nodes, days)
    return turned


def finish(folder: Path) -> Cluster:
    """Finishes a rotation: removes the old authority and token from all folders; nodes keep their new certificates.

    Raises:
        ConfigurationError: No rotation is under way, or a node's folder is not complete.
    """
    cluster = load(folder)
    if not cluster.rotating:
        raise ConfigurationError("no rotation is under way; begin one with `chaos-lightning keys rotate`")
    done = replace(cluster, old_authority="", bridge="", tokens=cluster.tokens[:1])
    leaves: dict[str, str] = {}
    for node in done.nodes:
        path = folder / NODES / node.name / CHAIN
        try:
            leaves[node.name] = first_of(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: {error}; write it again: `keys node {node.name} --renew`") from error
        if not signed_by(leaves[node.name], done.authority[0]):
            raise ConfigurationError(
                f"{node.name}'s certificate is of the old authority; write it again: "
                f"`keys node {node.name} --renew`, and copy it before the old one is believed no longer"
            )
    for node in done.nodes:
        there = folder / NODES / node.name
        _write(there / TRUSTED, done.authority[0])
        _write(there / CHAIN, leaves[node.name])
        if shows_token(node.role):
            _write(there / TOKEN, f"{done.tokens[0]}\n")
    save(folder, done)  # last: until then it can be done again
    return done


def _check_days(days: float) -> None:
    if not 0 < days <= AUTHORITY_DAYS:
        raise ConfigurationError(f"--days {days:g}: expected more than 0 and up to {AUTHORITY_DAYS}")


def show(folder: Path) -> list[Facts]:
    """Returns the facts of all certificates in a cluster's folder, or of the one in a node's folder; no secrets.

    Raises:
        ConfigurationError: There are no keys here.
    """
    if (folder / CHAIN).exists():
        return [facts_of(folder / CHAIN)]
    return [facts_of(folder / NODES / node.name / CHAIN) for node in load(folder).nodes]
