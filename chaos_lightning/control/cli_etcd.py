"""`chaos-lightning etcd up`: servers of one's own for development."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from chaos_lightning.errors import ConfigurationError


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
    from chaos_lightning.control.etcd_servers import EtcdServers

    if action != "up":
        raise ConfigurationError(f"etcd {action}: expected `chaos-lightning etcd up`")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
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
