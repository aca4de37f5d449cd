"""Models of 100,000 tensors: lists of all their names fit into records and messages."""

from __future__ import annotations

from functools import cache

import pytest
from leader_rig import Rig

from chaos_lightning.outer.exchange.vocabulary import FROM_CLUSTER, TO_FOLLOWER, body_bytes, entry_of
from chaos_lightning.outer.follower.shard_files import _MOST_HEADER_NBYTES
from chaos_lightning.outer.rules import effects as fx
from chaos_lightning.outer.rules import messages as say
from chaos_lightning.outer.rules.summaries import MOST_CHARACTERS, summary_of
from chaos_lightning.outer.rules.types import NO_VERSION, Agreement, JobOpened, TensorSpec
from chaos_lightning.protocol.codec import MAX_CONTROL_NBYTES
from chaos_lightning.service.etcd_store import EtcdStore, _record_bytes, _unpacked
from chaos_lightning.service.store import MAX_RECORD_NBYTES, StoreRecord

MANY = 100_000


@cache
def many() -> Agreement:
    names = (
        f"model.layers.{i // 384:03d}.mlp.experts.{i % 384 // 3:03d}.{'udg'[i % 3]}_proj.weight" for i in range(MANY)
    )
    return Agreement(tuple(TensorSpec(name, "float32", (1408, 2048)) for name in names))


def test_the_first_record_of_a_job_names_all_tensors() -> None:
    """Former bug: the first record of a job with a model of 15,800 tensors had more than 1 MiB, and ended the
    leader.
    """
    opened = JobOpened(many(), "home at a test", "nonce")
    record = StoreRecord(1, "JobOpened", 1, body_bytes(opened), "")
    assert entry_of(record, "").body == opened
    assert len(_record_bytes(record)) < MAX_RECORD_NBYTES, "etcd takes it, too"


def test_etcd_gives_back_what_was_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    record = StoreRecord(7, "JobOpened", 3, b"tensor" * 50_000, "before")
    store = object.__new__(EtcdStore)

    class Found:
        key, value = b"record/0000000000000007", _record_bytes(record)

    assert len(Found.value) < 2000
    assert store._record(Found()) == record
    with pytest.raises(ValueError, match="cut off, or larger than"):
        _unpacked(b"")


def test_messages_that_name_all_tensors_fit() -> None:
    hello = say.ClusterHello("home", "here", "n", 0, None, NO_VERSION, NO_VERSION, many())
    obey = say.Obey(1, "n", 0, 1, many(), (), NO_VERSION, ())
    assert len(FROM_CLUSTER.wrap(hello).SerializeToString()) < MAX_CONTROL_NBYTES
    assert len(TO_FOLLOWER.wrap(obey).SerializeToString()) < MAX_CONTROL_NBYTES
    assert sum(len(tensor.name) + 120 for tensor in many().tensors) < _MOST_HEADER_NBYTES


def test_a_summary_has_room_for_all_tensors() -> None:
    rig = Rig()
    home = rig.comes("home", 2)
    for number in (1, 2, 3):
        rig.push(home, number)
    rig.machine.chain.agreement = many()
    assert len(summary_of(rig.machine.chain, ()).state) < MOST_CHARACTERS


def test_a_model_that_a_store_cannot_name_is_refused_in_words() -> None:
    rig = Rig()
    rig.stores = lambda entry: (
        fx.EntryStored(False, "a record of 2 MiB", unfit=True)
        if isinstance(entry.body, JobOpened)
        else fx.EntryStored(True)
    )
    rig.feed(fx.Heard(2, say.ClusterHello("home", "here", "n", 0, None, NO_VERSION, NO_VERSION, rig.agreed)))
    assert rig.dismissed[2].reason == "home cannot begin a job with 1 tensors: a record of 2 MiB"
    assert not rig.machine.desk.done
