"""Sub-commands of `chaos-lightning` that talk to a scheduler; the one that runs it is in scheduler_main.py.

gRPC is imported when one of them needs it.
"""

from __future__ import annotations

import enum
import os
import platform
import signal
import sys
import threading
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated, Any

import typer

from chaos_lightning.control.options import SchedulerOptions, check_settings
from chaos_lightning.declared import declared
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoints
from chaos_lightning.machine.signals import ends
from chaos_lightning.machine.terminal import print_json, printable
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.settings import DEFAULT_ENDPOINT, EngineConfig


def _option(name: str, words: str = "", **more: Any) -> Any:
    """Returns a typer option for a setting of members, for commands that take it too."""
    made = declared(EngineConfig)[name]
    return typer.Option(help=words or f"{made.help} Or the environment: {made.variable}.", metavar=made.metavar, **more)


TokenFile = Annotated[str, _option("token_file")]
KeysDir = Annotated[str, _option("keys_dir")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for scripts.")]
Endpoint = Annotated[str, _option("endpoint", "The scheduler.", envvar="CHAOS_ENDPOINT", show_default=True)]


def drain(
    node: Annotated[str, typer.Argument(help="A member's name or id, or a node's name: then all its members.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: AsJson = False,
) -> None:
    """Ask a node to leave politely.

    Its members finish the step they are in, hand over, and end by themselves; nothing is lost and nobody waits. The
    same as Ctrl+C there.
    """
    from chaos_lightning.control.requests import drain as ask

    asked = ask(endpoint, node, Credentials.load(keys_dir, token_file))
    if as_json:
        print_json({"asked": asked})
        return
    print(printable(f"asked to leave: {', '.join(asked)}"))


def reset(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    force: Annotated[bool, typer.Option("--force", help="Also while members live, or may live.")] = False,
    job: Annotated[str, typer.Option(help="Name of the job, where no scheduler answers.")] = "default",
    store: Annotated[
        str, typer.Option(help="Its chain, where no scheduler answers; default as for `scheduler`.", metavar="PATH")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """End a job on your word, so that the next one by its name can begin.

    For a job whose members are dead and that waits for them, since nobody can prove it. What they trained is lost but
    for checkpoints; the chain of its views is archived. Through its scheduler if one answers, else on the chain's file.
    Refused while members live: ask them to leave by `drain`.
    """
    from chaos_lightning.control.resetting import reset_job

    options = SchedulerOptions(
        listen=split_endpoints(endpoint)[0], settings=check_settings(Settings(job=job)), store=store
    )
    _done(reset_job(endpoint, options, Credentials.load(keys_dir, token_file), force=force), as_json)


def _done(words: str, as_json: bool) -> None:
    """Prints what a command has done, as text or JSON."""
    if as_json:
        print_json({"done": words})
    else:
        print(printable(words))


class LinkAction(enum.StrEnum):
    ADD = "add"
    REMOVE = "remove"


def link(
    action: Annotated[LinkAction, typer.Argument(help="Connect the two, or disconnect them.", metavar="add|remove")],
    a: Annotated[str, typer.Argument(help="A member's name or id.")],
    b: Annotated[str, typer.Argument(help="Another one's.")],
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    as_json: AsJson = False,
) -> None:
    """Add or remove a link between two members while they train.

    The trees change with the next step; nothing else moves and nobody waits. A link that was removed stays away, also
    when members come and go, until it is added again. One without which the members would fall apart is not removed.
    """
    from chaos_lightning.control.requests import change_link

    token = Credentials.load(keys_dir, token_file)
    _done(change_link(endpoint, a, b, add=action is LinkAction.ADD, token=token), as_json)


def version(as_json: AsJson = False) -> None:
    """Print the versions that a bug report needs."""
    found = {}
    for package in ("chaos-lightning", "torch", "lightning", "grpcio", "protobuf"):
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["python"] = f"{platform.python_version()} ({sys.executable})"
    proc = "proc" if Path("/proc").exists() else "no proc"
    found["system"] = f"{platform.platform()}, {os.cpu_count()} processors, {proc}"
    if as_json:
        print_json(found)
        return
    for name, words in found.items():
        print(f"{name} {words}")


def etcd(
    action: Annotated[str, typer.Argument(help="up: start servers, and end them with Ctrl+C.", metavar="up")],
    servers: Annotated[int, typer.Option(help="How many: 1, 3 or 5.")] = 1,
    folder: Annotated[Path, typer.Option(help="Their data and logs; what lies there is continued.")] = Path("etcd"),
) -> None:
    """Run etcd servers on this machine, for development.

    They listen on loopback, without passwords, on ports that are free. Give what is printed to every scheduler or
    torchrun: --store etcd://... or --rdzv-conf store=etcd://... Ctrl+C ends them; their data stays. A server that
    ends is started again, unless it ends at once three times in a row: then all are ended, with what it said last.
    """
    from chaos_lightning.service.etcd_servers import EtcdServers

    if action != "up":
        raise ConfigurationError(f"etcd {action}: expected `chaos-lightning etcd up`")
    ended = threading.Event()
    for number in ends():
        signal.signal(number, lambda *_: ended.set())
    with EtcdServers(folder.absolute(), servers) as started:
        print(f"{servers} etcd server{'s' if servers > 1 else ''} in {folder}; Ctrl+C ends them")
        print(f"  chaos-lightning scheduler --store '{started.address}' ...")
        print(
            f"  torchrun --rdzv-backend=chaos --rdzv-conf 'store={started.address.replace(',', '+')}' ...", flush=True
        )
        while not ended.wait(1.0):
            for line in started.tend():
                print(line, flush=True)
