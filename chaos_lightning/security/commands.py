"""`chaos-lightning keys`: manages who may join a cluster on an open network."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.terminal import print_json


class KeysAction(enum.StrEnum):
    INIT = "init"
    NODE = "node"
    ROTATE = "rotate"
    SHOW = "show"


def keys(
    action: Annotated[KeysAction, typer.Argument(help="What to do.", metavar="init|node|rotate|show")],
    name: Annotated[str, typer.Argument(help="For node: whom to make keys for.", metavar="NAME[=HOST/IP,...]")] = "",
    folder: Annotated[
        Path, typer.Option("--dir", help="The cluster's folder; for show also a node's.", metavar="DIR")
    ] = Path("keys"),
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="For init: a member, and where a scheduler on it is reached (repeatable).",
            metavar="NAME[=HOST/IP,...]",
        ),
    ] = None,
    cluster: Annotated[str, typer.Option(help="For init: the cluster's name.")] = "cluster",
    role: Annotated[
        str,
        typer.Option(
            help="For node: member, observer (status), operator (status, drain, link); with a parameter server cluster "
            "(trains with it) or follower (runs it)."
        ),
    ] = "",
    days: Annotated[float, typer.Option(help="How long new certificates hold.")] = 365.0,
    renew: Annotated[bool, typer.Option("--renew", help="For node: new keys for a node that has some.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(help="For rotate: a node that gets no new keys (repeatable).", metavar="NAME")
    ] = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="For rotate: the second half; what is old is no longer believed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for scripts.")] = False,
) -> None:
    """Make and renew the keys of a cluster: who may join it, watch it, and drain its nodes.

    init makes DIR with an authority, a token and DIR/nodes/NAME for each node; copy each of these folders to its node
    and name it there with keys_dir. DIR itself stays with its owner. node adds one more, rotate renews everything while
    the job trains (copy the folders again, then rotate --finish, then copy them once more), show lists who has keys.
    """
    given = {"NAME": bool(name), "--node": bool(node), "--role": bool(role), "--renew": renew}
    given |= {"--without": bool(without), "--finish": finish, "--cluster": cluster != "cluster"}
    known = {
        KeysAction.INIT: {"--node", "--cluster"},
        KeysAction.NODE: {"NAME", "--role", "--renew"},
        KeysAction.ROTATE: {"--without", "--finish"},
        KeysAction.SHOW: set(),
    }[action]
    if odd := [option for option, there in given.items() if there and option not in known]:
        raise ConfigurationError(
            f"keys {action}: {', '.join(odd)} means nothing here; it takes {', '.join([*sorted(known), '--json'])}"
        )
    if action is KeysAction.INIT:
        _init(folder, node or [], cluster, days, as_json=as_json)
    elif action is KeysAction.NODE:
        _node(folder, name, role, days, renew=renew, as_json=as_json)
    elif action is KeysAction.ROTATE:
        _rotate(folder, without or [], days, finish=finish, as_json=as_json)
    else:
        _show(folder, as_json=as_json)


def _init(folder: Path, nodes: list[str], cluster: str, days: float, *, as_json: bool) -> None:
    from chaos_lightning.security.keyfiles import NODES, KeyHolder, init

    if not nodes:
        raise ConfigurationError("keys init: name the nodes, for example --node a=10.0.0.5 --node b=10.0.0.6")
    made = init(folder, [KeyHolder.read(text) for text in nodes], name=cluster, days=days)
    if as_json:
        places = [(n, str(folder / NODES / n.name)) for n in made.nodes]
        print_json({"nodes": [{"name": n.name, "role": n.role, "hosts": n.hosts, "folder": at} for n, at in places]})
        return
    for member in made.nodes:
        hosts = f" for {', '.join(member.hosts)}" if member.hosts else ""
        print(f"{folder / NODES / member.name}: {member.role}{hosts}")
    print("copy each folder to its node alone, and give it there as keys_dir; keep the rest of the keys to yourself")


def _node(folder: Path, name: str, role: str, days: float, *, renew: bool, as_json: bool) -> None:
    from chaos_lightning.security.keyfiles import KeyHolder, add, load
    from chaos_lightning.security.roles import MEMBER

    if not name:
        raise ConfigurationError("keys node: say whom the keys are for, for example: keys node c=10.0.0.7")
    known = load(folder).node(name.partition("=")[0].strip()) if renew else None
    as_role = role or (known.role if known is not None else MEMBER)
    there = add(folder, KeyHolder.read(name, as_role), days=days, renew=renew)
    if as_json:
        print_json({"folder": str(there), "role": as_role})
        return
    print(f"{there}: {as_role}; copy it to that node")


def _rotate(folder: Path, without: list[str], days: float, *, finish: bool, as_json: bool) -> None:
    from chaos_lightning.security.keyfiles import NODES, rotate
    from chaos_lightning.security.keyfiles import finish as end

    if finish:
        if without:
            raise ConfigurationError("keys rotate --finish: --without belongs to the first half, which is done")
        end(folder)
        if as_json:
            print_json({"rotating": False, "folder": str(folder / NODES)})
            return
        print(f"done; copy the folders in {folder / NODES} to their nodes once more: then nothing old is believed")
        return
    made = rotate(folder, without=without, days=days)
    if as_json:
        print_json({"rotating": True, "folder": str(folder / NODES), "nodes": [n.name for n in made.nodes]})
        return
    print(
        f"new keys for {', '.join(n.name for n in made.nodes)}; copy their folders in {folder / NODES} to them now, in"
    )
    print("any order, while the job trains; when all have theirs: chaos-lightning keys rotate --finish")


def _show(folder: Path, *, as_json: bool) -> None:
    from chaos_lightning.security.certificates import when
    from chaos_lightning.security.keyfiles import CLUSTER, load, show

    rows = show(folder)
    rotating = (folder / CLUSTER).exists() and load(folder).rotating
    if as_json:
        nodes = [
            {"name": r.name, "role": r.role, "hosts": r.hosts, "until": r.until.isoformat(), "trouble": r.trouble}
            for r in rows
        ]
        print_json({"rotating": rotating, "nodes": nodes})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "role", "until", "made for"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            row.role,
            f"{when(row.until)}{' (' + row.trouble + ')' if row.trouble else ''}",
            ", ".join(row.hosts),
        )
    Console().print(table)
    if rotating:
        print("a rotation is under way: when all nodes have their new folders, `chaos-lightning keys rotate --finish`")
