"""Tests the deployment recipes as far as possible here: Dockerfile, systemd units, Kubernetes manifests, Slurm job."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from blocks_support import block
from installed_support import Installed, bash
from test_tutorial import Terminals, here, terminals
from until_support import until

from chaos_lightning.machine.listener import free_port

__all__ = ["terminals"]

SLURM = ("slurmctld", "slurmd", "munged", "sbatch")


# ------------------------------------------------------------------------------------------------ Docker


def dockerfile() -> list[tuple[str, str]]:
    """Returns the instructions of the recipe's Dockerfile, in order, as (word, arguments)."""
    lines = block("docs/recipes/docker.md", "FROM python").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if not line.startswith("#"))]


@pytest.mark.slow
def test_the_dockerfile_does_what_docker_would_do(installed: Installed, tmp_path: Path) -> None:
    """The Dockerfile's instructions are carried out in a folder, without Docker."""
    shutil.copy(installed.wheel, tmp_path)
    (tmp_path / "train.py").write_text(block("docs/tutorial.md", "import lightning"))
    image = tmp_path / "image"
    image.mkdir()
    for word, rest in dockerfile():
        match word:
            case "FROM":
                assert re.fullmatch(r"python:3\.1[1-9]-slim", rest)
            case "RUN":
                installed.run(rest, image)
            case "COPY":
                source, target = rest.split()
                assert target == "."
                shutil.copy(tmp_path / source, image)
            case "ENV":
                assert all(re.fullmatch(r"[A-Z_]+=\S+", part) for part in shlex.split(rest))
            case "ENTRYPOINT":
                assert json.loads(rest) == block("docs/tutorial.md", "python train.py").split()
            case _:
                assert (word, rest) in [
                    ("ARG", "PIP_EXTRA_INDEX_URL"),
                    ("WORKDIR", "/job"),
                    ("STOPSIGNAL", f"{signal.Signals.SIGTERM.name}"),
                ]
    installed.run("python -m py_compile train.py", image)


def options_of(command: list[str]) -> list[str]:
    """Returns the long options of a command line that come before its first other word."""
    return [word.partition("=")[0] for word in command if word.startswith("-")]


def test_dockers_options_exist() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    pages = [
        block("docs/recipes/docker.md", start)
        for start in ("docker build", "docker run --init --rm", "docker run --init -d", "docker stop")
    ]
    for command in "".join(pages).replace("\\\n", " ").splitlines():
        words = shlex.split(command)
        known = subprocess.run(["docker", words[1], "--help"], capture_output=True, text=True, timeout=30).stdout
        used = options_of(words[2 : words.index("train") if "train" in words else None])
        assert used
        assert [option for option in used if not re.search(rf"(^|\s){re.escape(option)}[\s,]", known)] == []


# ------------------------------------------------------------------------------------------------ systemd


def units() -> dict[str, str]:
    """Returns the texts of the recipe's systemd unit files, by file name."""
    starts = ("# /etc/systemd/system/chaos-scheduler.service", "# /etc/systemd/system/chaos-member.service")
    texts = [block("docs/recipes/systemd.md", start) for start in starts]
    return {text.splitlines()[0].rpartition("/")[2]: text for text in texts}


def service(text: str) -> dict[str, list[str]]:
    """Returns the [Service] section of a systemd unit: lists of values by key."""
    found: dict[str, list[str]] = {}
    for line in text.partition("[Service]")[2].partition("[Install]")[0].split("\n"):
        if "=" in line:
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_takes_the_units(installed: Installed, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for name, text in units().items():
        # Programs must be there, and the user, too.
        text = text.replace("/opt/train/venv/bin", str(installed.bin)).replace("User=train", "User=root")
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, timeout=60
        )
        assert [line for line in (done.stdout + done.stderr).splitlines() if name in line] == []
        assert done.returncode == 0, done.stderr
    assert set(re.findall(r"\S+\.service", block("docs/recipes/systemd.md", "systemctl daemon-reload"))) == set(units())


@pytest.mark.slow
def test_the_units_programs_run_and_stop_politely(terminals: Terminals) -> None:
    """The programs of both systemd units are started with the units' environment, and end properly on SIGTERM."""
    folder, installed = terminals.folder, terminals.installed
    (folder / "venv").symlink_to(installed.bin.parent)
    port = free_port()
    installed.run("chaos-lightning keys init --dir keys --node a=127.0.0.5", folder)
    (folder / "chaos-keys").symlink_to(folder / "keys" / "nodes" / "a")

    def local(text: str) -> str:
        return here(text, port).replace("/opt/train", str(folder)).replace("/var/lib/", f"{folder}/")

    scheduler, member = (service(local(text)) for text in units().values())
    (folder / "chaos-scheduler").mkdir()
    terminals.harness.start("scheduler", ["env", *scheduler["Environment"], *shlex.split(scheduler["ExecStart"][0])])
    settings = " ".join([*member["Environment"], "SYSTEMD_EXEC_PID=$$"])  # as systemd sets it
    terminals.type("member", f"{settings} {member['ExecStart'][0]}", Path(member["WorkingDirectory"][0]))
    terminals.goes_on("member")
    for name in ("member", "scheduler"):
        terminals.harness.terminate(name)
        assert terminals.harness.wait_exit(name) == 0


# ------------------------------------------------------------------------------------------------ Kubernetes


def manifests() -> list[dict[str, Any]]:
    """Returns the Kubernetes manifests of the recipe."""
    return list(yaml.safe_load_all(block("docs/recipes/kubernetes.md", "apiVersion")))


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifests_fit_kubernetes_own_schemas(version: str) -> None:
    assert len(manifests()) == 4
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = manifests()[-1] | {"spec": manifests()[-1]["spec"] | {"replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_manifests_agree_with_each_other_and_with_the_commands(installed: Installed, tmp_path: Path) -> None:
    found = manifests()
    kinds = {(m["kind"], m["metadata"]["name"]): m for m in found}
    pods = [m["spec"]["template"]["spec"] for m in found if m["kind"] == "Deployment"]
    commands = block("docs/recipes/kubernetes.md", "chaos-lightning keys init")
    secrets_made = re.findall(r"secret generic (\S+) --from-file=(\S+)", commands)
    used = {v["secret"]["secretName"] for pod in pods for v in pod["volumes"] if "secret" in v}
    assert {name for name, _ in secrets_made} == used
    installed.run(commands.splitlines()[0], tmp_path)
    assert [folder for _, folder in secrets_made if not (tmp_path / folder / "node.key").is_file()] == []
    claims = {
        v["persistentVolumeClaim"]["claimName"] for pod in pods for v in pod["volumes"] if "persistentVolumeClaim" in v
    }
    assert all(("PersistentVolumeClaim", claim) in kinds for claim in claims)
    for deployment in (m["spec"] for m in found if m["kind"] == "Deployment"):
        assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    host, port = pods[1]["containers"][0]["env"][0]["value"].split(":")
    served = kinds["Service", host]["spec"]
    assert served["ports"][0]["port"] == int(port)
    assert served["selector"] == kinds["Deployment", host]["spec"]["template"]["metadata"]["labels"]
    mode = {v["secret"]["defaultMode"] for pod in pods for v in pod["volumes"] if "secret" in v}
    assert mode == {0o400}  # YAML 1.1, which kubectl reads, takes 0400 as octal
    scheduler = pods[0]["containers"][0]["command"]
    said = installed.run(shlex.join([*scheduler[:2], "--help"]), tmp_path)
    assert [word for word in options_of(scheduler) if word not in said] == []
    targets = re.findall(r"deploy(?:ment)?/(\S+)", block("docs/recipes/kubernetes.md", "kubectl scale"))
    assert [name for name in targets if ("Deployment", name) not in kinds] == []


# ------------------------------------------------------------------------------------------------ Slurm


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Runs a Slurm cluster on this machine (munged, slurmctld, slurmd); yields environment variables with
    SLURM_CONF.
    """
    if missing := [name for name in SLURM if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed (apt-get install slurmctld slurmd munge)")
    if os.getuid():
        pytest.skip("slurmd starts jobs for others, so it runs as root")
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    (folder / "munge").mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key").chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(SLURM_CONF.format(host=host, folder=folder, control=free_port(), node=free_port()))
    munge = [
        f"--{name}={folder / 'munge' / name.partition('-')[0]}"
        for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    commands = (
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration)],
    )
    daemons = []
    env = {"SLURM_CONF": str(configuration)}
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=out))
            if command[0] == "munged":
                until((folder / "munge" / "socket").exists, "munged")
        idle = ["sinfo", "--noheader", "--format=%t"]
        until(
            lambda: subprocess.run(idle, env=os.environ | env, capture_output=True, text=True).stdout.strip() == "idle",
            "Slurm's node",
        )
        yield env
        subprocess.run(["scancel", "--user=root"], env=os.environ | env, check=True, timeout=30)
        jobs = ["squeue", "--noheader"]
        until(
            lambda: not subprocess.run(jobs, env=os.environ | env, capture_output=True, text=True).stdout.strip(),
            "the end of jobs",
        )
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


SLURM_CONF = """\
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={control}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slurm_runs_the_batch_script(slurm: dict[str, str], terminals: Terminals) -> None:
    """The batch script runs with two tasks on one node instead of two nodes, and a second batch job joins the first."""
    folder, installed, port = terminals.folder, terminals.installed, free_port()
    script = block("docs/recipes/slurm.md", "#!/bin/bash")
    assert "--nodes=2\n#SBATCH --ntasks-per-node=1" in script
    script = script.replace("--nodes=2", "--nodes=1").replace("--ntasks-per-node=1", "--ntasks-per-node=2")
    (folder / "train.sbatch").write_text(here(script, port))
    env = {**slurm, "CHAOS_LOG_DIR": str(terminals.harness.logs)}
    installed.run(block("docs/recipes/slurm.md", "(umask 077"), folder)
    first = block("docs/recipes/slurm.md", "sbatch train.sbatch").strip()
    # The script chooses the endpoint itself.
    bash(first, folder, {k: v for k, v in (installed.environment(folder) | env).items() if k != "CHAOS_ENDPOINT"})

    def joined() -> set[str]:
        return {r.node for r in terminals.harness.records if r.name == "joined"}

    terminals.harness.wait_until(lambda: len(joined()) == 2, "two tasks")
    terminals.harness.wait_for("notice", lambda r: "end of Slurm job" in r["text"])
    more = block("docs/recipes/slurm.md", "sbatch --nodes=4").replace("--nodes=4", "--nodes=1 --ntasks=1")
    host = socket.gethostname().partition(".")[0]
    bash(more.replace("node17:29400", f"{host}:{port}"), folder, installed.environment(folder) | env)
    terminals.harness.wait_until(lambda: len(joined()) == 3, "the task of the second job")
    step = max(int(r["step"]) for r in terminals.harness.records if r.name == "committed")
    terminals.harness.wait_step(step + 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slurm_job_whose_time_is_up_leaves_in_time_and_is_queued_again(
    slurm: dict[str, str], terminals: Terminals
) -> None:
    """The batch script has a time limit of a minute and asks to be queued again: its member leaves before, keeps the
    state, and then Slurm restarts the job.
    """
    folder, installed, port = terminals.folder, terminals.installed, free_port()
    script = block("docs/recipes/slurm.md", "#!/bin/bash")
    for given, wanted in (
        ("--nodes=2", "--nodes=1"),
        ("--time=08:00:00", "--time=00:01:00"),
        ("--no-requeue", "--requeue"),
        ("CHAOS_NOTICE=slurm\n", "CHAOS_NOTICE=slurm:requeue+lead:30s\n"),
    ):
        assert given in script
        script = script.replace(given, wanted)
    (folder / "train.sbatch").write_text(here(script, port))
    env = {**slurm, "CHAOS_LOG_DIR": str(terminals.harness.logs)}
    installed.run(block("docs/recipes/slurm.md", "(umask 077"), folder)
    environment = installed.environment(folder) | env
    said = bash("sbatch train.sbatch", folder, {k: v for k, v in environment.items() if k != "CHAOS_ENDPOINT"})
    job = said.split()[-1]
    taken = terminals.harness.wait_for("notice_taken", deadline_s=120.0)
    assert taken["reason"].startswith(f"end of Slurm job {job}, in ")
    terminals.harness.wait_for("kept")

    def restarts() -> bool:
        shown = ["scontrol", "show", "job", job]
        return "Restarts=1" in subprocess.run(shown, env=os.environ | slurm, capture_output=True, text=True).stdout

    until(restarts, "the restart of the job", 60.0)
