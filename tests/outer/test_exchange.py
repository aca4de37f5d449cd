"""Tests that what is encoded for a state that is gone goes nowhere."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import torch

from chaos_lightning.events.events import EventLog
from chaos_lightning.outer.cluster.cluster_log import OuterLog
from chaos_lightning.outer.cluster.cluster_model import ClusterModel
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.cluster.exchange import FollowerExchange, VersionGetter
from chaos_lightning.outer.cluster.replica import Replica
from chaos_lightning.outer.exchange.codec import Part, codec_named
from chaos_lightning.outer.rules.cluster import Unpushed
from chaos_lightning.outer.rules.types import NO_VERSION, IncarnationId, PushId

PUSH = PushId(IncarnationId("home", 1), 1)


def test_a_push_that_is_encoded_while_the_state_is_forgotten_goes_nowhere() -> None:
    """A rank that is removed gets the others' state anew; what it encodes meanwhile must not be served for that."""
    options = ClusterOptions.build({"server": "127.0.0.1:9", "name": "home", "data": "local", "host_server": False}, {})
    replica, changed = Replica([("w", torch.zeros(64))]), threading.Condition(threading.RLock())
    model = ClusterModel(replica, replica.grid(64), codec_named("fp32"))
    log = OuterLog(options, EventLog(None), lambda: None)
    getter = VersionGetter(changed, model.empty, lambda: None, lambda version: None)
    done, asked, go_on = list[Any](), threading.Event(), threading.Event()

    def wanted() -> bool:
        asked.set()
        return go_on.wait(30.0)

    def took(part: Part, manifest: str) -> bool:
        done.append(manifest)
        return True

    exchange = FollowerExchange(
        options, b"", model, log, lambda *given, **fields: None, changed, lambda: "home", getter
    )
    with closing(exchange):
        for forgets in (False, True):
            model.freeze(PUSH)
            asked.clear()
            go_on.clear()
            exchange.encode(PUSH, NO_VERSION, Unpushed(), wanted=wanted, done=took, failed=done.append)
            assert asked.wait(30.0)
            if forgets:
                exchange.forget()
            go_on.set()
            exchange._worker.submit(lambda: None).result(30.0)
            assert len(done) == 1
