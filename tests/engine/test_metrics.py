"""Tests that metrics of a real job, scraped by Prometheus or pushed to a collector, agree with the job's logs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from engine_members import UNTIL_ENOUGH

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.observe.exporter import JOB_LABEL, METRICS, Shown, ask_scheduler, follow_logs, pushed, served
from chaos_lightning.observe.fields import spent
from chaos_lightning.observe.spans import size

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
Values = dict[tuple[str, tuple[str, ...]], float]


def scraped(port: int) -> Values:
    return read(f"http://127.0.0.1:{port}/metrics")


def read(url: str) -> Values:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    families = list(parser.text_string_to_metric_families(text))
    kinds = {f.name: f.type for f in families}
    known = {m.name.removesuffix("_total"): m.kind for m in METRICS}
    assert {name: kind for name, kind in kinds.items() if not name.endswith("_created")}.items() <= known.items()
    assert all(f.documentation for f in families)
    samples = [s for f in families for s in f.samples]
    assert all(JOB_LABEL in s.labels for s in samples)
    return {(s.name, tuple(v for k, v in s.labels.items() if k != JOB_LABEL)): s.value for s in samples}


def of(values: Values, short: str, *labels: str) -> float:
    return values[f"chaos_lightning_{short}", labels]


def test_without_arguments_the_schedulers_job_is_followed_here(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    now = ask_scheduler(job.endpoint)
    for name in "ab":
        job.start(name, settings={"min_nodes": 2, "log_dir": "auto"}, epochs=UNTIL_ENOUGH)
    job.harness.wait_until(lambda: now().values.get("samples_total", {}).get((), 0) > 0, "what members log")
    assert now().job == "default"
    values = now().values
    assert (values["up"], values["world_size"]) == ({(): 1}, {(): 2})
    assert values["step"][()] > 0
    (tmp_path / "enough").touch()
    for name in "ab":
        assert job.harness.wait_exit(name) == 0


@contextlib.contextmanager
def command(*options: str, said: str = "") -> Iterator[str]:
    """Runs `chaos-lightning metrics` while the block runs; yields the address that it prints.

    Args:
        said: Text that the command must write to stderr.
    """
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    words = [sys.executable, "-m", "chaos_lightning", "metrics", *options]
    # SIGINT is ignored, as by a shell that starts it in the background.
    words = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.removeprefix("metrics at ").partition(";")[0]
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, said)


def test_a_scrape_says_what_the_logs_say(job: Job) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    for name in "ab":
        job.start(name, settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH)
        job.harness.wait_for("welcomed", node=name)
    first = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2)
    with served(follow_logs(job.harness.logs), "127.0.0.1:0") as port:
        job.start("c", settings={"min_nodes": 2}, epochs=UNTIL_ENOUGH)
        three = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 3, after=first)
        live = scraped(port)
        assert of(live, "up") == 1
        assert of(live, "world_size") == 3
        assert of(live, "step") >= three["step"]
        with served(ask_scheduler(job.endpoint), "127.0.0.1:0") as other:
            asked = scraped(other)
        assert (of(asked, "up"), of(asked, "world_size")) == (1, 3)
        job.harness.kill("c")
        after = job.harness.wait_for("committed", lambda r: len(r["contributors"]) == 2, after=three)
        job.harness.wait_step(after["step"] + 20)
        job.finish("a", "b")
        end = scraped(port)
        records = job.harness.records
    commits = [r for r in records if r.name == "committed"]
    steps = {r["header"] for r in commits if r["kind"] == "step"}
    assert of(end, "steps_total") == len(steps)
    used = sum(size(spans) for r in commits for spans in spent(r["spent"]).values())
    assert of(end, "samples_total") == used
    assert of(end, "step") == max(r["step"] for r in commits)
    assert of(end, "epoch") == max(epoch for r in commits for _, epoch in spent(r["ledger"]))
    assert sum(v for (name, _), v in end.items() if name == "chaos_lightning_joins_total") == 3
    assert sum(v for (name, _), v in end.items() if name == "chaos_lightning_deaths_total") == 1
    assert of(end, "leaves_total") == len([r for r in records if r.name == "left" and r.own])
    assert of(end, "pauses_total", "recovery") >= 1
    assert of(end, "pause_seconds_total", "recovery") > 0
    received = sum(r["nbytes"] for r in records if r.name == "pull_done")
    assert of(end, "state_bytes_total") == received > 0
    assert of(end, "log_lines_lost_total") == 0
    assert of(end, "step_seconds_total") > 0
    assert of(live, "last_commit_age_seconds") >= 0
    assert "chaos_lightning_last_commit_age_seconds" not in {name for name, _ in end}, "the job is done"
    assert of(end, "world_size") == 0
    assert all(end[key] >= value for key, value in live.items() if key[0].endswith("_total")), "counters never fall"


def test_a_collector_is_pushed_the_same(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="opentelemetry's exporter is not installed")
    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as messages
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service

    got: dict[str, Any] = {}
    came = threading.Event()

    class Collector(service.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            for scope in request.resource_metrics[0].scope_metrics:
                got.update({metric.name: metric for metric in scope.metrics})
            came.set()
            return messages.ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_MetricsServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    values = Shown("mine", {"up": {(): 1.0}, "joins_total": {("founder",): 2.0}})
    with pushed(lambda: values, f"http://127.0.0.1:{port}", 0.2):
        assert came.wait(30)
    server.stop(0)
    assert got["chaos_lightning_up"].gauge.data_points[0].as_double == 1.0
    (point,) = got["chaos_lightning_joins"].sum.data_points
    assert point.as_double == 2.0
    assert {a.key: a.value.string_value for a in point.attributes} == {JOB_LABEL: "mine", "role": "founder"}


def test_a_port_that_is_taken_is_named() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with (
        served(lambda: Shown("", {"up": {(): 1.0}}), "127.0.0.1:0") as port,
        pytest.raises(ConfigurationError, match=rf"--listen 127.0.0.1:{port}: .*in use"),
        served(lambda: Shown("", {}), f"127.0.0.1:{port}"),
    ):
        pass


def test_the_address_of_ipv6_is_one_that_can_be_opened(tmp_path: Path) -> None:
    (tmp_path / "member-a-1.jsonl").touch()
    with command("--logs", str(tmp_path), "--listen", "[::1]:0") as url:
        assert url.startswith("http://[::1]:")
        assert of(read(url), "up") == 1


def test_a_folder_without_logs_is_not_up_until_there_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    said = f"no event log in {folder}: chaos_lightning_up is 0 until that changes\n"
    with command("--logs", str(folder), "--listen", "127.0.0.1:0", said=said) as url:
        assert read(url) == {("chaos_lightning_up", ()): 0}
        folder.mkdir()
        assert of(read(url), "up") == 0
        (folder / "member-a-1.jsonl").touch()
        assert of(read(url), "up") == 1


@pytest.mark.parametrize(
    ("otlp", "interval_s", "told"),
    [
        ("127.0.0.1:4317", 15.0, "--otlp 127.0.0.1:4317: write .* such as http://127.0.0.1:4317"),
        ("http://127.0.0.1:4317", 0.0, "--interval 0: write a positive number of seconds"),
        ("http://127.0.0.1:4317", -1.0, "--interval -1: write"),
        ("http://127.0.0.1:4317", float("nan"), "--interval nan: write"),
    ],
)
def test_where_and_how_often_to_push_is_checked(otlp: str, interval_s: float, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told), pushed(lambda: Shown("", {}), otlp, interval_s):
        pass


def test_a_scheduler_that_does_not_answer_is_down() -> None:
    assert ask_scheduler("127.0.0.1:9")() == Shown("", {"up": {(): 0}})


def test_the_page_lists_every_metric() -> None:
    """The list of metrics in docs is up to date; with CHAOS_REWRITE=1 the test writes it."""
    rows = "".join(
        f"| `{m.name}`{''.join(f' {{{label}}}' for label in m.labels)} | {m.kind} | {m.help} |\n" for m in METRICS
    )
    head, mark, rest = PAGE.read_text().partition("## List\n\n")
    _, more, tail = rest.partition("\n## ")
    told = head + mark + "| metric | kind | what |\n|---|---|---|\n" + rows + more + tail
    if os.environ.get("CHAOS_REWRITE"):
        PAGE.write_text(told)
    assert PAGE.read_text() == told, "run it with CHAOS_REWRITE=1"
    for m in METRICS:
        assert m.name.startswith("chaos_lightning_")
        assert m.name.endswith("_total") == (m.kind == "counter")
