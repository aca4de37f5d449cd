"""`chaos-lightning demo-diloco`: clusters train one model apart, and the server between them is killed piece by piece.

Theory of operation. Three etcd servers hold the chain; on three machines a leader may lead, and the first one has two
followers and a warm spare, too (`chaos-lightning ps up --store etcd://...`). Without etcd there is one machine, with
its chain in SQLite. Four clusters of different speeds train a small GPT on text: one comes late, and one dies; of an
elastic one a rank is killed while a push of it is under way, and another joins. Then, each as soon as the one before
has been got over: a follower gets SIGKILL, the leading leader, and at last every process of the server at once. What
became of it is judged from the event logs alone. Exit codes are those of `demo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import typer

from chaos_lightning.control.etcd_servers import EtcdServers, find_etcd
from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.fields import integer
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.rules.types import Round
from chaos_lightning.testing.demo.far import FarCluster, FarNodes
from chaos_lightning.testing.demo.far_proof import Plot, prove
from chaos_lightning.testing.demo.nodes import places_for
from chaos_lightning.testing.demo.stage import (
    Accelerator,
    Directory,
    Keep,
    Pace,
    Quick,
    Scenario,
    Stage,
    play,
    words_of,
)
from chaos_lightning.testing.edge.runner import prepare

SERVERS = ("server-1", "server-2", "server-3")
FAST, BENDS, DIES, LATE = (
    FarCluster(name="home", pause_s=0.05),
    FarCluster(name="edge", pause_s=0.09, nodes=("edge-1", "edge-2", "edge-3")),
    FarCluster(name="van", pause_s=0.26),
    FarCluster(name="lab", pause_s=0.14),
)
CLUSTERS = (FAST, BENDS, DIES, LATE)
FRESH_S, PUSHES = 0.2, 10
"""The rank dies within so many seconds of a push's freezing. On a busy machine that is read late, when the push may be
there already; then the next one is taken, of so many at most."""
MOST_S = 300.0
"""Longest time of the demo, s; not with --quick, for which others wait while they use the machine."""
ENOUGH_LEFT = 500
"""Samples, which take clusters some seconds."""


@dataclass(frozen=True, kw_only=True)
class FarSize:
    """How large and how long it is: rounds between two acts, deadlines, arguments for the training script."""

    rest_rounds: int = 4
    pace: Pace = field(default_factory=Pace)
    arguments: tuple[str, ...] = ()


FULL = FarSize(arguments=("--layers=3", "--width=96", "--batch-size=4", "--text=130000", "--inner-steps=12"))
QUICK = FarSize(
    rest_rounds=2,
    arguments=("--layers=3", "--width=96", "--batch-size=4", "--text=100000", "--inner-steps=8"),
)

# ------------------------------------------------------------------ acts


class Story:
    """The acts, each a method that takes the stage.

    Args:
        size: How long they rest.
    """

    def __init__(self, size: FarSize) -> None:
        self.size = size

    @property
    def acts(self) -> tuple[Callable[[Stage[FarNodes]], None], ...]:
        """In order."""
        return (
            self.server_starts,
            self.clusters_start,
            self.one_comes_late,
            self.one_dies,
            self.a_rank_dies,
            self.a_follower_dies,
            self.the_leader_dies,
            self.all_of_the_server_dies,
            self.finish,
        )

    def server_starts(self, stage: Stage[FarNodes]) -> None:
        nodes = stage.nodes
        names = list(nodes.places)
        stage.say("do", f"the server starts: chaos-lightning {' '.join(nodes.server.words(names[0]))}")
        if len(names) == 1:
            stage.say("seen", "without etcd: ONE leader, with its chain in SQLite, and none that stands by for it")
        nodes.server.start_all()
        led = _first(stage, "outer_leader_started", deadline_s=stage.pace.start_deadline_s)
        stage.say("good", f"the leader at {led.get('endpoint')} leads; {len(names) - 1} others stand by")

    def clusters_start(self, stage: Stage[FarNodes]) -> None:
        nodes = stage.nodes
        founders = [cluster for cluster in CLUSTERS if cluster is not LATE]
        stage.say("do", f"{len(founders)} clusters start: python -m {' '.join(nodes.cluster_words(FAST))}")
        for cluster in founders:
            nodes.start_cluster(cluster)
        for cluster in founders:
            adopted = _adopts(stage, cluster.name)
            stage.say("seen", f"{cluster.name} is in, with {adopted.get('version')}")
        self._rest(stage)
        stage.say("good", _progress(stage))

    def one_comes_late(self, stage: Stage[FarNodes]) -> None:
        stage.say("do", f"{LATE.name} starts, while the others train")
        stage.nodes.start_cluster(LATE)
        adopted = _adopts(stage, LATE.name)
        answered = _first(
            stage, "push_answered", lambda r: r.node == LATE.name and r["answer"] == "accepted", after=adopted.t
        )
        stage.say("good", f"{LATE.name} took {adopted.get('version')}; {answered.get('version')} has its first push")
        self._rest(stage)

    def one_dies(self, stage: Stage[FarNodes]) -> None:
        stage.say("do", f"kill -9 for {DIES.name}")
        at = time.time()
        stage.nodes.kill(DIES.name)
        gone = _first(stage, "entry", lambda r: r["kind"] == "Removed", after=at)
        stage.say("good", f"{DIES.name} is removed {duration(gone.t - at)} later; its samples go to the others")
        self._rest(stage)

    def a_rank_dies(self, stage: Stage[FarNodes]) -> None:
        nodes, (_, dies, joins) = stage.nodes, BENDS.nodes
        worker, _ = stage.worker(dies)
        after = time.time()
        for _ in range(PUSHES):
            frozen = _first(stage, "push_frozen", lambda r: r.node == BENDS.name, after=after)
            if time.time() - frozen.t < FRESH_S:
                break
            after = frozen.t
        stage.say("do", f"kill -9 for {dies}, a rank of {BENDS.name}, while push {frozen.get('push')} is under way")
        nodes.kill(dies, worker)
        answered = _first(stage, "push_answered", lambda r: r.get("push") == frozen.get("push"), after=frozen.t)
        stage.say("good", f"{answered.get('push')} is {answered.get('answer')}; {joins} starts in its place")
        nodes.start_node(BENDS, joins)
        joined = stage.joined(joins)
        stage.say("good", f"{joins} is a rank of {BENDS.name} from its step {joined.get('step')} on")
        self._rest(stage)

    def a_follower_dies(self, stage: Stage[FarNodes]) -> None:
        server = stage.nodes.server
        child = next(
            r for r in reversed(stage.records)
            if r.name == "server_child" and r.get("up") and "follower" in str(r.get("child"))
        )  # fmt: skip
        stage.say("do", f"kill -9 for {child.get('child')}")
        at = time.time()
        server.strike("follower_sigkill", server.first, integer(child.get("pid")))
        loaded = _first(stage, "version_loaded", after=at)
        self._decided(stage, loaded.t)
        stage.say("good", f"another one stood at {loaded.get('version')} {duration(loaded.t - at)} later")
        self._rest(stage)

    def the_leader_dies(self, stage: Stage[FarNodes]) -> None:
        server = stage.nodes.server
        facts = _facts(stage)
        name = next((n for n, place in server.places.items() if place == facts["endpoint"]), "")
        if facts["role"] != "leader" or not name:
            raise ChaosError(f"no leader of this demo leads: {facts}")
        stage.say("do", f"kill -9 for the leading leader, on {name}")
        at = time.time()
        server.strike("leader_sigkill", name, integer(facts["pid"]))
        led = _first(stage, "outer_leader_started", after=at)
        stage.say("good", f"the leader at {led.get('endpoint')} leads {duration(led.t - at)} later, term {led['term']}")
        self._decided(stage, led.t)
        if name in server.down:
            server.start(name)
        self._rest(stage)

    def all_of_the_server_dies(self, stage: Stage[FarNodes]) -> None:
        nodes = stage.nodes
        at = time.time()
        count = nodes.server.kill_all()
        stage.say("do", f"kill -9 for all {count} processes of the server at once; then the same commands again")
        nodes.server.start_all()
        led = _first(stage, "outer_leader_started", after=at)
        stage.say("seen", f"the leader at {led.get('endpoint')} leads {duration(led.t - at)} later")
        decided = self._decided(stage, led.t)
        stage.say("good", f"{decided.get('version')} was decided {duration(decided.t - at)} after the kill")
        self._rest(stage)

    def finish(self, stage: Stage[FarNodes]) -> None:
        nodes = stage.nodes
        leases = _facts(stage)["leases"]
        # Not this epoch, if some may be through with it before all others have read of it.
        epochs = leases["epoch"] + (1 if leases["left"] > ENOUGH_LEFT else 2)
        (nodes.folder / "enough").write_text(str(epochs))
        stage.say("do", f"enough: all clusters stop after {epochs} epochs of the data")
        staying = [name for name in nodes.running if name not in nodes.fallen]
        codes = stage.exits(*staying)
        stage.judge(not any(codes.values()), f"the job is over; exit codes: {words_of(codes)}")
        stage.look()

    def _rest(self, stage: Stage[FarNodes]) -> None:
        """Some rounds in peace."""
        at = time.time()
        for _ in range(self.size.rest_rounds):
            at = self._decided(stage, at).t

    def _decided(self, stage: Stage[FarNodes], after: float) -> Record:
        """The first round after this time."""
        return _first(stage, "entry", lambda r: r["kind"] == Round.__name__, after=after)


def _first(
    stage: Stage[FarNodes],
    name: str,
    wanted: Callable[[Record], bool] = lambda r: True,
    *,
    after: float = 0.0,
    deadline_s: float | None = None,
) -> Record:
    """The first event of this name that is so, written after this time."""

    def found() -> Record | None:
        return next((r for r in stage.records if r.name == name and r.t > after and wanted(r)), None)

    return stage.wait(f"'{name}'", found, deadline_s)


def _adopts(stage: Stage[FarNodes], cluster: str) -> Record:
    """It has a first version."""
    deadline_s = stage.pace.start_deadline_s
    return _first(stage, "version_adopted", lambda r: r.node == cluster, deadline_s=deadline_s)


def _facts(stage: Stage[FarNodes]) -> dict[str, Any]:
    """Returns the facts of the present leader."""
    return fetch_facts(stage.nodes.server.endpoints, b"", 20.0)


def _progress(stage: Stage[FarNodes]) -> str:
    facts = _facts(stage)
    rates = ", ".join(f"{row['name']} {row['rate']:.0f}" for row in facts["clusters"])
    return f"{facts['rounds']} rounds, {facts['accepted']} pushes accepted; samples a second: {rates}"


# ------------------------------------------------------------------ the command


def _has_etcd() -> bool:
    try:
        find_etcd()
    except ConfigurationError:
        return False
    return True


def plot_of(candidates: int, most_s: float = 0.0) -> Plot:
    """Returns what the clusters and so many machines of the server are to show, and in how long."""
    return Plot(
        clusters=tuple(cluster.name for cluster in CLUSTERS),
        late=LATE.name,
        dies=DIES.name,
        bends=BENDS.name,
        ranks=BENDS.nodes,
        candidates=candidates,
        most_s=most_s,
    )


def demo_diloco(
    directory: Directory = None,
    quick: Quick = False,
    keep: Keep = False,
    accelerator: Accelerator = "cpu",
    sqlite: Annotated[
        bool, typer.Option("--sqlite", help="One leader, its chain in a file, as where etcd is not installed.")
    ] = False,
) -> None:
    """Train one model in clusters far apart; kill one, and the server; then prove that nothing was lost."""
    size = QUICK if quick else FULL
    folder = prepare(directory, "demo")
    etcd = None if sqlite or not _has_etcd() else EtcdServers(folder / "etcd", 3)
    nodes = FarNodes(
        folder,
        CLUSTERS,
        (*size.arguments, f"--accelerator={accelerator}"),
        places_for(*(SERVERS if etcd is not None else SERVERS[:1])),
        store=etcd.address if etcd is not None else "",
    )
    scenario = Scenario(
        name="demo-diloco",
        nodes=nodes,
        acts=Story(size).acts,
        prove=partial(prove, plot=plot_of(len(nodes.places), 0.0 if quick else MOST_S)),
        pace=size.pace,
        begin=etcd.start if etcd is not None else lambda: None,
        endings=(nodes.close, *((etcd.close,) if etcd is not None else ())),
    )
    play(scenario, folder, keep=keep)
