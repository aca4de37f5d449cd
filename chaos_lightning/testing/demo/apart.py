"""`chaos-lightning demo-diloco`: clusters train one model far apart, while parts of the server between them are killed.

Theory of operation. Three etcd servers hold the chain; on three machines a leader may lead, and the first one has two
followers and a warm spare, too (`chaos-lightning ps up --store etcd://...`). Without etcd there is one machine, with
its chain in SQLite. Four clusters of different speeds train a small GPT on text: one comes late, and one dies; of an
elastic one a rank is killed while a push of it is under way, and another joins. Then, each as soon as the one before
has been got over: a follower gets SIGKILL, the leading leader, and at last every process of the server at once. What
became of it is judged from the event logs alone. Exit codes are those of `demo`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from typing import Annotated, Any

import typer

from chaos_lightning.errors import ChaosError, ConfigurationError
from chaos_lightning.events.events import Record
from chaos_lightning.machine.units import duration
from chaos_lightning.observe.fields import integer
from chaos_lightning.outer.exchange.control_client import fetch_facts
from chaos_lightning.outer.rules.types import Round
from chaos_lightning.service.etcd_servers import EtcdServers
from chaos_lightning.testing.demo import acts
from chaos_lightning.testing.demo.far import BENDS, CLUSTERS, DIES, FAST, LATE, FarCluster
from chaos_lightning.testing.demo.far_proof import Plot, prove
from chaos_lightning.testing.demo.nodes import HASHES, Cast, places_for
from chaos_lightning.testing.demo.proof import words_of
from chaos_lightning.testing.demo.stage import Accelerator, Directory, Keep, Pace, Quick, Scenario, Stage, play
from chaos_lightning.testing.edge.runner import prepare
from chaos_lightning.testing.far_server import FarServer

SERVERS = ("server-1", "server-2", "server-3")
FRESH_S, PUSHES = 0.2, 10
"""Seconds after the freezing of a push within which the rank is killed, and number of pushes that are tried. On a busy
machine the event is read late, when the push may have arrived already; then the next push is taken.
"""
MOST_S = 300.0
"""Longest time that the demo may take, s. It is not checked with --quick, which runs while others use the machine."""
ENOUGH_LEFT = 500
"""Samples of an epoch that must be left if the job is to end with it; clusters take some seconds for them."""
ARGUMENTS = ("--layers=3", "--width=96", "--batch-size=4")
FULL, QUICK = ("--text=130000", "--inner-steps=12"), ("--text=100000", "--inner-steps=8")

# ------------------------------------------------------------------ acts


class Story:
    """Acts of `demo-diloco`, each a method that takes the `Stage` of the demo.

    Args:
        server: The parameter server between the clusters.
    """

    def __init__(self, server: FarServer) -> None:
        self.server = server

    def server_starts(self, stage: Stage[Cast]) -> None:
        names = list(self.server.places)
        stage.say("do", f"the server starts: chaos-lightning {' '.join(self.server.words(names[0]))}")
        if len(names) == 1:
            stage.say("seen", "without etcd: ONE leader, with its chain in SQLite, and none that stands by for it")
        self.server.start_all()
        led = stage.first("outer_leader_started", deadline_s=stage.pace.start_deadline_s)
        stage.say("good", f"the leader at {led.get('endpoint')} leads; {len(names) - 1} others stand by")

    def clusters_start(self, stage: Stage[Cast]) -> None:
        founders = [cluster for cluster in CLUSTERS if cluster is not LATE]
        stage.say("do", f"{len(founders)} clusters start: python -m {' '.join(_words(stage.nodes, FAST))}")
        for cluster in founders:
            for node in cluster.nodes[:2] or ("",):
                self._start(stage, cluster, node)
        for cluster in founders:
            stage.say("seen", f"{cluster.name} is in, with {_adopts(stage, cluster).get('version')}")
        _rest(stage)
        facts = self._facts()
        rates = ", ".join(f"{row['name']} {row['rate']:.0f}" for row in facts["clusters"])
        text = f"{facts['rounds']} rounds, {facts['accepted']} pushes accepted; samples a second: {rates}"
        stage.say("good", text)

    def one_comes_late(self, stage: Stage[Cast]) -> None:
        stage.say("do", f"{LATE.name} starts, while the others train")
        self._start(stage, LATE)
        adopted = _adopts(stage, LATE)
        answered = stage.first(
            "push_answered", lambda r: r.node == LATE.name and r["answer"] == "accepted", after=adopted.t
        )
        stage.say("good", f"{LATE.name} took {adopted.get('version')}; {answered.get('version')} has its first push")
        _rest(stage)

    def one_dies(self, stage: Stage[Cast]) -> None:
        stage.say("do", f"kill -9 for {DIES.name}")
        at = time.time()
        stage.nodes.note("sigkill", DIES.name)
        stage.nodes.kill_agent(DIES.name)
        gone = stage.first("entry", lambda r: r["kind"] == "Removed", after=at)
        stage.say("good", f"{DIES.name} is removed {duration(gone.t - at)} later; its samples go to the others")
        _rest(stage)

    def a_rank_dies(self, stage: Stage[Cast]) -> None:
        _, dies, joins = BENDS.nodes
        worker, _ = stage.worker(dies)
        after = time.time()
        for _ in range(PUSHES):
            frozen = stage.first("push_frozen", lambda r: r.node == BENDS.name, after=after)
            if time.time() - frozen.t < FRESH_S:
                break
            after = frozen.t
        stage.say("do", f"kill -9 for {dies}, a rank of {BENDS.name}, while push {frozen.get('push')} is under way")
        stage.nodes.kill(dies, worker)
        answered = stage.first("push_answered", lambda r: r.get("push") == frozen.get("push"), after=frozen.t)
        stage.say("good", f"{answered.get('push')} is {answered.get('answer')}; {joins} starts in its place")
        self._start(stage, BENDS, joins)
        joined = stage.joined(joins)
        stage.say("good", f"{joins} is a rank of {BENDS.name} from its step {joined.get('step')} on")
        _rest(stage)

    def a_follower_dies(self, stage: Stage[Cast]) -> None:
        child = next(
            r for r in reversed(stage.records)
            if r.name == "server_child" and r.get("up") and "follower" in str(r.get("child"))
        )  # fmt: skip
        stage.say("do", f"kill -9 for {child.get('child')}")
        at = time.time()
        self.server.strike("follower_sigkill", self.server.first, integer(child.get("pid")))
        loaded = stage.first("version_loaded", after=at)
        _decided(stage, loaded.t)
        stage.say("good", f"another one stood at {loaded.get('version')} {duration(loaded.t - at)} later")
        _rest(stage)

    def the_leader_dies(self, stage: Stage[Cast]) -> None:
        facts = self._facts()
        name = next((n for n, place in self.server.places.items() if place == facts["endpoint"]), "")
        if facts["role"] != "leader" or not name:
            raise ChaosError(f"no leader of this demo leads: {facts}")
        stage.say("do", f"kill -9 for the leading leader, on {name}")
        at = time.time()
        self.server.strike("leader_sigkill", name, integer(facts["pid"]))
        led = stage.first("outer_leader_started", after=at)
        stage.say("good", f"the leader at {led.get('endpoint')} leads {duration(led.t - at)} later, term {led['term']}")
        _decided(stage, led.t)
        if name in self.server.down:
            self.server.start(name)
        _rest(stage)

    def all_of_the_server_dies(self, stage: Stage[Cast]) -> None:
        at = time.time()
        count = self.server.kill_all()
        stage.say("do", f"kill -9 for all {count} processes of the server at once; then the same commands again")
        self.server.start_all()
        led = stage.first("outer_leader_started", after=at)
        stage.say("seen", f"the leader at {led.get('endpoint')} leads {duration(led.t - at)} later")
        decided = _decided(stage, led.t)
        stage.say("good", f"{decided.get('version')} was decided {duration(decided.t - at)} after the kill")
        _rest(stage)

    def finish(self, stage: Stage[Cast]) -> None:
        nodes = stage.nodes
        leases = self._facts()["leases"]
        # Not this epoch if little of it is left: some clusters may be through with it before others have read the file.
        epochs = leases["epoch"] + (1 if leases["left"] > ENOUGH_LEFT else 2)
        acts.enough(nodes.folder, epochs)
        stage.say("do", f"enough: all clusters stop after {epochs} epochs of the data")
        codes = stage.exits(*(name for name in nodes.nodes if name not in nodes.fallen))
        stage.judge(not any(codes.values()), f"the job is over; exit codes: {words_of(codes)}")
        stage.look()

    def _start(self, stage: Stage[Cast], cluster: FarCluster, node: str = "") -> None:
        """Starts a node of a cluster, or the cluster's only process if it has no nodes."""
        own = {"CHAOS_PS": self.server.endpoints, **({"CHAOS_NODE": node, **HASHES} if node else {})}
        command = [sys.executable, "-m", *_words(stage.nodes, cluster, node)]
        stage.nodes.run(node or cluster.name, command, own)

    def _facts(self) -> dict[str, Any]:
        """Returns what the leader of the parameter server reports of itself."""
        return fetch_facts(self.server.endpoints, b"", 20.0)


def _words(nodes: Cast, cluster: FarCluster, node: str = "") -> list[str]:
    """Returns the arguments after `python -m` that start this cluster, or one node of it."""
    module, folder, *more = nodes.training()
    script = [module, folder, f"--name={cluster.name}", f"--pause={cluster.pause_s:g}", *more]
    if not node:
        return script
    chain = nodes.folder / f"{cluster.name}.sqlite"
    return [
        *("torch.distributed.run", "--rdzv-backend=chaos", f"--rdzv-endpoint={nodes.endpoint}", "--nnodes=1:4"),
        *("--max-restarts=0", f"--rdzv-conf=idle_timeout_s=30,store={chain}", "-m", *script, "--inner=chaos"),
    ]


def _rest(stage: Stage[Cast]) -> None:
    """Waits for `pace.rest_steps` rounds in which the demo breaks nothing."""
    at = time.time()
    for _ in range(stage.pace.rest_steps):
        at = _decided(stage, at).t


def _decided(stage: Stage[Cast], after: float) -> Record:
    """Waits for the first round that the outer job decides after time `after`; returns its event."""
    return stage.first("entry", lambda r: r["kind"] == Round.__name__, after=after)


def _adopts(stage: Stage[Cast], cluster: FarCluster) -> Record:
    """Waits until a cluster has adopted its first version; returns the event."""
    deadline_s = stage.pace.start_deadline_s
    return stage.first("version_adopted", lambda r: r.node == cluster.name, deadline_s=deadline_s)


# ------------------------------------------------------------------ the command


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
    folder = prepare(directory, "demo")
    etcd = None
    with contextlib.suppress(ConfigurationError):  # it is not installed
        etcd = None if sqlite else EtcdServers(folder / "etcd", 3)
    arguments = (*ARGUMENTS, *(QUICK if quick else FULL), f"--accelerator={accelerator}")
    cast = Cast(folder, arguments, script="chaos_lightning.testing.demo.train_apart")
    server = FarServer(
        folder,
        cast.events,
        places_for(*(SERVERS if etcd is not None else SERVERS[:1])),
        cast.log,
        etcd.address if etcd is not None else "",
        environment=cast.mark.environment(),
    )
    cast.others = lambda: {name: child for name, child in server.machines.items() if name not in server.down}
    story = Story(server)
    scenario = Scenario(
        name="demo-diloco",
        nodes=cast,
        acts=(
            story.server_starts,
            story.clusters_start,
            story.one_comes_late,
            story.one_dies,
            story.a_rank_dies,
            story.a_follower_dies,
            story.the_leader_dies,
            story.all_of_the_server_dies,
            story.finish,
        ),
        prove=partial(prove, plot=Plot(len(server.places), 0.0 if quick else MOST_S)),
        pace=Pace(rest_steps=2 if quick else 4),
        begin=etcd.start if etcd is not None else lambda: None,
        endings=(cast.close, server.close, *((etcd.close,) if etcd is not None else ())),
    )
    play(scenario, folder, keep=keep)
