"""Serves metrics of a run for Prometheus to scrape, and pushes them as OpenTelemetry (`chaos-lightning metrics`).

Theory of operation. The metrics are folds over the same events as `top` and `report`: `RunTotals` takes one event after
the other and keeps numbers only, so that a run of days costs nothing; where time went is booked by `folds.intervals`,
each interval once, when the next slot shows that it is over. A scheduler's status gives what it knows without logs.
`METRICS` declares every metric once: both exporters and docs/metrics.md are made of it.

A counter falls to 0 when the exporter is started again and rises at once to what the logs say, as any restarted
process's does; Prometheus' `rate` and `increase` know that. Where jobs were logged one after the other, the latest one
counts, and counters begin at 0 with it; the label `chaos_job` has its name.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chaos_lightning.control.commands import Endpoint, KeysDir, TokenFile
from chaos_lightning.errors import ChaosError, ConfigurationError, needing
from chaos_lightning.events.reader import Record, Tail, log_files
from chaos_lightning.machine.addresses import join_endpoint, split_endpoint
from chaos_lightning.machine.signals import ends
from chaos_lightning.observe import fields as f
from chaos_lightning.observe import folds
from chaos_lightning.observe.following import AskedJob, Latest
from chaos_lightning.observe.outer.entries import read_entry
from chaos_lightning.observe.spans import merge, size
from chaos_lightning.observe.timeline import Timeline
from chaos_lightning.outer.rules.types import Round
from chaos_lightning.settings import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

POLL_S = 2.0
REASONS = ("silent", "closed", "asked", "process")
"""Classes of deaths: the first of these words in the evidence; else "other"."""

COUNTER, GAUGE = "counter", "gauge"
JOB_LABEL = "chaos_job"
"""Label of all metrics: the job's name. Prometheus itself gives the name `job` to what it scrapes."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric; its name contains the unit, and a counter's name ends in `_total`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = "1"


_PAUSES = 'Steps that something held up. "join": a newcomer; "recovery": a death or freeze; "waiting": too few members.'
_DEATHS = f"Members found dead, by a word of the evidence: {', '.join(REASONS)}; else other."
METRICS: tuple[Metric, ...] = (
    Metric("chaos_lightning_up", GAUGE, "1 if the scheduler answered, or there are logs; else 0."),
    Metric("chaos_lightning_step", GAUGE, "Optimizer steps of the job, by its latest committed slot."),
    Metric("chaos_lightning_epoch", GAUGE, "Epoch of its data."),
    Metric("chaos_lightning_world_size", GAUGE, "Members that contributed to the latest slot; 0 when the job is done."),
    Metric("chaos_lightning_last_commit_age_seconds", GAUGE, "Since the latest slot; gone at the job's end.", unit="s"),
    Metric("chaos_lightning_steps_total", COUNTER, "Optimizer steps, as somebody committed them first."),
    Metric("chaos_lightning_step_seconds_total", COUNTER, "Seconds that these steps took.", unit="s"),
    Metric("chaos_lightning_samples_total", COUNTER, "Samples used in committed slots, by all members together."),
    Metric("chaos_lightning_joins_total", COUNTER, "Members that came in.", ("role",)),
    Metric("chaos_lightning_leaves_total", COUNTER, "Members that left as they should."),
    Metric("chaos_lightning_deaths_total", COUNTER, _DEATHS, ("reason",)),
    Metric("chaos_lightning_fenced_total", COUNTER, "Members that had joined and learned that they were put out."),
    Metric("chaos_lightning_pauses_total", COUNTER, _PAUSES, ("cause",)),
    Metric("chaos_lightning_pause_seconds_total", COUNTER, "Lost to that, beyond a usual step.", ("cause",), "s"),
    Metric("chaos_lightning_link_bytes_total", COUNTER, "Bytes on links between members.", ("direction",), "By"),
    Metric("chaos_lightning_state_bytes_total", COUNTER, "Bytes of training state that newcomers received.", unit="By"),
    Metric("chaos_lightning_log_lines_lost_total", COUNTER, "Lines of event logs that are missing."),
    Metric("chaos_lightning_outer_version", GAUGE, "Number of the latest version of outer sync."),
    Metric("chaos_lightning_outer_rounds_total", COUNTER, "Rounds of outer sync that were decided."),
    Metric("chaos_lightning_outer_pushes_total", COUNTER, "Clusters' pushes that rounds decided on.", ("answer",)),
)  # fmt: skip
_BY_NAME = {metric.name.removeprefix("chaos_lightning_"): metric for metric in METRICS}
Labels = tuple[str, ...]


def _zero() -> dict[str, dict[Labels, float]]:
    """Returns all counters without labels at 0, since a rate can only be computed from a counter that started at 0."""
    found: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
    for short, metric in _BY_NAME.items():
        if metric.kind == COUNTER and not metric.labels:
            found[short][()] = 0.0
    return found


@dataclass(slots=True)
class RunTotals:
    """Metrics of the latest job that logged into a folder, computed from events in order."""

    job: str = ""
    """Name of the job; "" until a member or leader has told it."""
    values: dict[str, dict[Labels, float]] = field(default_factory=_zero)
    """Number by short name and label values."""
    _latest: Latest = field(init=False)
    _booked: float = 0.0
    """Wall time (s) at which the last interval that is booked ended."""
    _committed: float = 0.0
    _carried: dict[tuple[str, str, str, str], int] = field(default_factory=dict)
    """Bytes of each link as told last, by (source, member, peer, direction)."""
    _dead: set[str] = field(default_factory=set)
    _joined: set[str] = field(default_factory=set)
    _round: int = 0

    def __post_init__(self) -> None:
        self._latest = Latest(self._book)

    def take(self, r: Record) -> None:
        """Takes in one more event."""
        fresh = str(r.get("header", "")) not in self._latest.timeline.slots
        if self._latest.take(r):
            self._begin()
        own = r.own and r.by == r.member
        if r.name in ("joined", "outer_leader_started") and r.get("job"):
            self.job = str(r["job"])
        if r.name == "lost":
            self._add("log_lines_lost_total", f.number(r.get("count")))
        elif r.name == "death" and r.member not in self._dead:
            self._dead.add(r.member)
            evidence = str(r.get("evidence", ""))
            self._add("deaths_total", 1, next((word for word in REASONS if word in evidence), "other"))
        elif r.name == "entry":
            self._entry(r)
        elif own and r.name == "committed":
            self._commit(r, fresh)
        elif own and r.name == "joined":
            self._joined.add(r.member)
            self._add("joins_total", 1, str(r.get("role", "")))
        elif own and r.name == "left":
            self._add("leaves_total", 1)
        elif own and r.name == "finished":
            self._finish()
        elif own and r.name == "fenced" and r.member in self._joined:  # others say hello anew beside a kept state
            self._add("fenced_total", 1)
        elif own and (r.name == "pull_done" or (r.name == "part_pulled" and r.member not in self._joined)):
            self._add("state_bytes_total", f.number(r.get("nbytes")))
        elif own and r.name == "links":
            self._links(r)

    def _begin(self) -> None:
        """Resets all metrics, since another job begins."""
        self.values, self.job, self._committed = _zero(), "", 0.0
        self._dead, self._joined, self._round = set(), set(), 0

    def _add(self, short: str, amount: float, *labels: str) -> None:
        self.values[short][labels] += amount

    def _commit(self, r: Record, fresh: bool) -> None:
        self._add("samples_total", sum(size(merge(spans)) for spans in f.spent(r.get("spent")).values()))
        if not fresh:
            return
        self._committed = max(self._committed, r.t)
        step = f.integer(r.get("step"))
        kind = r.get("kind", "step")
        if kind == "step":
            self._add("steps_total", 1)
            self._add("step_seconds_total", f.number(r.get("duration_s")))
        self.values["step"][()] = step
        self.values["world_size"][()] = len(f.rows(r.get("contributors")))
        if ledger := f.spent(r.get("ledger")):
            self.values["epoch"][()] = max(epoch for _, epoch in ledger)
        if kind == "closing":
            self._finish()

    def _finish(self) -> None:
        """Notes that the job is over: no members are left, and no next commit is awaited."""
        self._committed = 0.0
        self.values["world_size"][()] = 0
        self.values.pop("last_commit_age_seconds", None)

    def _links(self, r: Record) -> None:
        for row in f.rows(r.get("links")):
            for direction in ("sent", "received"):
                if isinstance(row, Mapping) and f"{direction}_nbytes" in row:
                    where = (r.source, r.member, str(row.get("peer", "")), direction)
                    now, before = f.integer(row[f"{direction}_nbytes"]), self._carried.get(where, 0)
                    self._carried[where] = now  # a link that was made anew counts from 0
                    self._add("link_bytes_total", now - before if now >= before else now, direction)

    def _entry(self, r: Record) -> None:
        told = read_entry(r)
        if told.entry is None:
            return
        self.values["outer_version"][()] = told.entry.version.number
        body = told.entry.body
        if isinstance(body, Round) and body.number > self._round:
            self._round = body.number
            self._add("outer_rounds_total", 1)
            self._add("outer_pushes_total", len(body.accepted), "accepted")
            self._add("outer_pushes_total", len(body.rejected), "rejected")

    def _book(self, timeline: Timeline) -> None:
        """Counts the pauses (joins, recoveries, waiting) in the intervals that ended since the last call."""
        for interval in folds.intervals(timeline)[:-1]:
            if interval.stop > self._booked:
                self._booked = interval.stop
                if interval.cause in (folds.JOIN, folds.RECOVERY, folds.WAITING):
                    self._add("pauses_total", 1, interval.cause)
                    self._add("pause_seconds_total", interval.lost, interval.cause)

    def shown(self, now: float) -> Shown:
        """Returns all metrics as of now (wall time, s)."""
        self._book(self._latest.timeline)
        self.values["up"][()] = 1
        if self._committed:
            self.values["last_commit_age_seconds"][()] = max(0.0, now - self._committed)
        return Shown(self.job, {short: dict(each) for short, each in self.values.items()})


@dataclass(frozen=True, slots=True)
class Shown:
    """Values of all metrics at one time.

    Attributes:
        job: Name of the job; "" if it is not known.
        values: Number by short name and label values.
    """

    job: str
    values: Mapping[str, Mapping[Labels, float]]


DOWN: Mapping[str, Mapping[Labels, float]] = {"up": {(): 0}}
Source = Callable[[], Shown]
"""Function that returns all values as of now."""


def follow_logs(logs: Path, since: float = 0.0) -> Source:
    """Returns a source of metrics that follows a log directory; until the directory appears, its metric `up` is 0."""
    tail, totals, lock = Tail(logs, since), RunTotals(), threading.Lock()

    def now() -> Shown:
        if not log_files(logs):
            return Shown("", DOWN)
        with lock:  # a scrape and the regular look may meet
            for record in tail.new():
                totals.take(record)
            return totals.shown(time.time())

    return now


def ask_scheduler(endpoint: str, token_file: str = "", keys_dir: str = "", timeout_s: float = 2.0) -> Source:
    """Returns a source of metrics that asks a scheduler for members and step, and takes the rest from logs on this
    machine.
    """
    from chaos_lightning.security.credentials import Credentials

    asked = AskedJob(endpoint, Credentials.load(keys_dir, token_file), timeout_s, follow_logs)

    def now() -> Shown:
        try:
            facts = asked.facts()
        except ChaosError:
            outer = asked.outer()
            if outer is not None:
                return outer
            before = asked.logged() if asked.logged is not None else Shown("", {})
            return Shown(before.job, {**before.values, **DOWN})
        machine = facts.get("machine") or {}
        logged = asked.logged().values if asked.logged is not None else {}
        members = [m for m in f.rows(machine.get("members")) if isinstance(m, Mapping)]
        # Members seldom tell a scheduler their step.
        steps = [*logged.get("step", {}).values(), *(f.integer(m.get("step")) for m in members)]
        told: dict[str, Mapping[Labels, float]] = {
            "up": {(): 1},
            "world_size": {(): len(members)},
            "step": {(): max(steps, default=0)},
        }
        return Shown(str(facts.get("job", "")), {**logged, **told})

    return now


# ------------------------------------------------------------------------------------------------ exporters


class Scraped:
    """Collector with the interface that prometheus_client expects."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Family]:
        """Yields all metrics that have a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        shown = self._source()
        for short, each in shown.values.items():
            metric = _BY_NAME[short]
            made = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = made(metric.name, metric.help, labels=(JOB_LABEL, *metric.labels))
            for labels, value in each.items():
                family.add_metric((shown.job, *labels), value)
            yield family


@contextlib.contextmanager
def served(source: Source, listen: str) -> Iterator[int]:
    """Serves `/metrics` at HOST:PORT; yields the port (port 0: the system chooses a free one).

    Raises:
        ConfigurationError: The address cannot be listened on.
    """
    with needing("chaos-lightning metrics"):
        from prometheus_client import CollectorRegistry, start_http_server
    host, port = split_endpoint(listen)
    registry = CollectorRegistry()
    registry.register(Scraped(source))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigurationError(f"--listen {listen}: {error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def pushed(source: Source, otlp: str, interval_s: float) -> Iterator[None]:
    """Pushes all metrics to an OpenTelemetry collector (OTLP over gRPC, http:// or https://) every `interval_s`
    seconds.

    Raises:
        ConfigurationError: The address is none, or the interval is no positive number.
    """
    if not otlp.startswith(("http://", "https://")):
        raise ConfigurationError(f"--otlp {otlp}: write how it is reached, such as http://{otlp}, or https:// for TLS")
    if not 0 < interval_s < math.inf:
        raise ConfigurationError(f"--interval {interval_s:g}: write a positive number of seconds, such as 15")
    with needing("--otlp"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

    def callback(short: str, labels: tuple[str, ...]) -> Callable[[CallbackOptions], Sequence[Observation]]:
        def observe(_: CallbackOptions) -> Sequence[Observation]:
            shown = source()
            each = shown.values.get(short, {}).items()
            names = (JOB_LABEL, *labels)
            return [Observation(value, dict(zip(names, (shown.job, *found), strict=True))) for found, value in each]

        return observe

    exporter = OTLPMetricExporter(endpoint=otlp, insecure=otlp.startswith("http://"))
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=interval_s * 1e3)
    provider = MeterProvider([reader], resource=Resource.create({"service.name": "chaos-lightning"}))
    meter = provider.get_meter("chaos_lightning")
    for short, metric in _BY_NAME.items():
        make: Any = meter.create_observable_counter if metric.kind == COUNTER else meter.create_observable_gauge
        make(metric.name.removesuffix("_total"), [callback(short, metric.labels)], metric.unit, metric.help)
    try:
        yield
    finally:
        provider.shutdown()


def metrics(
    logs: Annotated[Path | None, typer.Option(help="Follow this log directory (log_dir).", metavar="DIR")] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = "",
    keys_dir: KeysDir = "",
    listen: Annotated[
        str, typer.Option(help="Where Prometheus scrapes /metrics; port 0: any.", metavar="HOST:PORT")
    ] = "127.0.0.1:9464",
    otlp: Annotated[
        str,
        typer.Option(help="Push to this OpenTelemetry collector, too (OTLP over gRPC).", metavar="http://HOST:PORT"),
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between two pushes.")] = 15.0,
) -> None:
    """Serve metrics of a job to Prometheus, and push them as OpenTelemetry, until Ctrl+C, SIGTERM or SIGHUP.

    Of its event logs, which know everything (docs/metrics.md); or of what its scheduler answers, members and step, with
    what members of this machine log where nobody told them.
    """
    for number in ends():  # a shell that starts it in the background has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    source = follow_logs(logs) if logs is not None else ask_scheduler(endpoint, token_file, keys_dir)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        port = stack.enter_context(served(source, listen))
        if otlp:
            stack.enter_context(pushed(source, otlp, interval))
        # The first look reads what there is already; a scrape meanwhile waits for its end.
        if not source().values["up"][()]:
            nothing = f"no event log in {logs}" if logs is not None else f"no scheduler answers at {endpoint}"
            typer.echo(f"{nothing}: chaos_lightning_up is 0 until that changes", err=True)
        where = join_endpoint(split_endpoint(listen)[0], port)
        typer.echo(f"metrics at http://{where}/metrics; Ctrl+C ends it")
        while True:
            time.sleep(POLL_S)
            source()
