"""Makes followers from a warm spare: a process that has imported torch, so that a follower starts within milliseconds.

Theory of operation. Importing torch takes seconds, a fork of a process that has done so takes none. The supervisor
(outer/commands/supervisor.py) keeps one spare, and asks it for every follower: a line of JSON with the follower's name
and arguments. The spare forks twice, so that the follower is the supervisor's child and not its own: whoever kills the
spare kills no follower. The follower itself says its process id on the same connection. A spare never has more than the
thread that forks, and holds nothing that a follower could inherit by mistake.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from chaos_lightning.machine.orphan import die_with_parent

HEAVY = ("chaos_lightning.outer.exchange.control_client", "chaos_lightning.outer.follower.follower_process")
_TURN_S = 0.0005


def main(arguments: Sequence[str]) -> int:
    """Makes followers at the supervisor's request until the supervisor closes the connection.

    Args:
        arguments: Descriptor of the connection to the supervisor, and the supervisor's process id.
    """
    line, supervisor = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    for module in HEAVY:
        importlib.import_module(module)
    from chaos_lightning.outer.commands import follower_main

    gc.collect()
    gc.freeze()  # else each follower's first collections would copy what it shares with the others
    line.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    for text in line.makefile("rb"):
        asked = json.loads(text)
        if os.fork() == 0:
            if os.fork():
                os._exit(0)
            code = 1
            try:
                _become_child_of(supervisor)
                line.sendall(json.dumps({"pid": os.getpid(), "name": asked["name"]}).encode() + b"\n")
                line.close()
                code = follower_main.main(asked["arguments"])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.wait()
    return 0


def _become_child_of(supervisor: int) -> None:
    """Waits until the supervisor is this process's parent, since the process between the two is about to end; from then
    on this process dies with the supervisor.
    """
    os.setsid()
    while os.getppid() != supervisor:
        os.kill(supervisor, 0)  # raises where it is gone
        time.sleep(_TURN_S)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
