"""Runs a worker for torchrun tests: a member without torch, which reports its events, one JSON line each.

Arguments: "once" fails in its first life; "stay" (default) stays until SIGTERM, then leaves politely.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from chaos_lightning.control.agent import Agent
from chaos_lightning.machine.orphan import watch_parent
from chaos_lightning.machine.process_table import host_identity, start_time
from chaos_lightning.protocol.types import (
    NO_VIEW,
    Decide,
    Entered,
    Heartbeat,
    Hello,
    Leave,
    NextView,
    OpenLinks,
    Ready,
    Refused,
    Released,
    ToMember,
    Welcome,
)
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.settings import EngineConfig

config = EngineConfig.build({})
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
done = threading.Event()


def say(what: str, **more: Any) -> None:
    line = {"what": what, "name": config.name, "pid": os.getpid(), "restarts": restarts, **more}
    os.write(1, (json.dumps(line) + "\n").encode())


def hello() -> Hello:
    return Hello(
        job=config.job,
        name=config.name,
        host=host_identity(),
        address=config.bind,
        port=1,
        pid=os.getpid(),
        pid_start=start_time(os.getpid()),
        quota=1,
        accumulate=1,
        package="0",
        fingerprint=(),
        resume=me[0] if in_view else "",
        node=os.environ.get("CHAOS_NODE", ""),
    )


me: list[str] = []
in_view: list[bool] = []


def on_message(message: ToMember) -> None:
    if isinstance(message, Welcome):
        me[:] = [message.member.id]
        say("welcome", id=message.member.id, role=message.role)
        if in_view:
            agent.send(Entered(entered[0], 0, 0, ""))
    elif isinstance(message, OpenLinks):
        agent.send(Ready())
    elif isinstance(message, Decide):
        # Only founders get this far without training; nothing is ever contributed here.
        in_view[:] = [True]
        entered[:] = [message.view.id]
        say("view", members=message.view.ids())
        agent.send(Entered(message.view.id, 0, 0, ""))
    elif isinstance(message, NextView):
        say("next_view", members=message.view.ids())
    elif isinstance(message, Released | Refused):
        say(type(message).__name__.lower(), reason=message.reason)
        done.set()


entered: list[Any] = [NO_VIEW]
agent = Agent(
    endpoints=config.endpoints,
    token=Credentials.load(config.keys_dir, config.token_file),
    hello_factory=hello,
    on_message=on_message,
    on_state=lambda state: say("state", state=state),
    heartbeat=lambda: Heartbeat(entered[0], 0, 0),
)


def on_term(*_: object) -> None:
    say("term")
    agent.send(Leave("SIGTERM"))
    # A standby is released at once; a member would have to wait for a header, which nobody makes here.
    threading.Timer(1.0, done.set).start()


signal.signal(signal.SIGTERM, on_term)
watch_parent(lambda reason: say("orphan", reason=reason), grace_s=5.0)
environment = {k: v for k, v in os.environ.items() if k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
say("start", min_nodes=config.min_nodes, max_nodes=config.max_nodes, endpoint=config.endpoint, **environment)
agent.start()
if "once" in sys.argv and restarts == 0:
    say("fail")
    agent.close()
    os._exit(1)
while not done.wait(0.5):
    pass
agent.close()
say("end")
