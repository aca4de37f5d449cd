"""Helpers to install the wheel by the commands of docs/install.md, and to run its commands as a user would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from blocks_support import ROOT, block
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from chaos_lightning.machine.listener import free_port

LIMIT_S = 170
OURS = ("chaos_lightning", "strategies", "callbacks", "configs", "pyproject.toml", "README.md", "LICENSE")


def bash(script: str, folder: Path, env: dict[str, str]) -> str:
    """Runs a bash script and returns its output; fails if the script does. A final `:` keeps bash alive, for completion
    to find it.
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{script}\n:"], cwd=folder, env=env, text=True, timeout=LIMIT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


def _needed(project: str, extras: Iterable[str], found: set[str]) -> set[str]:
    """Returns the projects that a project needs with these extras, directly or indirectly."""
    for line in metadata.requires(project) or ():
        need = Requirement(line)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and (key := f"{canonicalize_name(need.name)}{sorted(need.extras)}") not in found:
            found.add(key)
            _needed(need.name, need.extras, found)
    return found


def _downloaded(folder: Path, extras: Iterable[str]) -> Path:
    """Makes a folder with links to the packages that pip would download for these extras, taken from this
    environment.
    """
    folder.mkdir()
    source = Path(sysconfig.get_paths()["purelib"])
    for name in {key.partition("[")[0] for key in _needed("chaos-lightning", extras, set())}:
        for part in {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            if not (folder / part).is_symlink():  # a folder that two packages share
                (folder / part).symlink_to(source / part)
    return folder


@dataclass
class Installed:
    """Separate environment with the wheel installed.

    Attributes:
        bin: Folder of the environment's programs.
        said: Output of the commands of docs/install.md.
        used: Endpoint of each folder in which commands run, by folder, with a free port each.
    """

    bin: Path
    wheel: Path
    said: str = ""
    used: dict[Path, str] = field(default_factory=dict)

    def environment(self, folder: Path) -> dict[str, str]:
        """Returns environment variables for a user in this folder: a home and an endpoint of its own, and no
        settings.
        """
        env = {key: value for key, value in os.environ.items() if not key.startswith(("CHAOS_", "PYTHON"))}
        endpoint = self.used.setdefault(folder, f"127.0.0.1:{free_port()}")
        home = folder / "home"
        home.mkdir(exist_ok=True)
        return env | {
            "PATH": f"{self.bin}:{env['PATH']}", "HOME": str(home), "XDG_STATE_HOME": str(home),
            "CHAOS_ENDPOINT": endpoint, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def run(self, script: str, folder: Path, **more: str) -> str:
        """Runs a script in a folder and returns its output."""
        return bash(script, folder, self.environment(folder) | more)


def install(folder: Path) -> Installed:
    """Runs the commands of docs/install.md in a folder, with downloads replaced by packages from this environment."""
    source = folder / "source"
    source.mkdir()
    for name in OURS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    wheel = next(iter(Path(folder / "dist").glob("*.whl")), Path("chaos_lightning-0.1.0-py3-none-any.whl"))
    made = Installed(folder / "venv" / "bin", wheel)
    env = made.environment(folder)
    here = Path(sys.executable).parent
    # Without isolation the build takes hatchling from this environment; "0" is how pip spells that.
    building = env | {"PATH": f"{here}:{env['PATH']}", "PIP_NO_BUILD_ISOLATION": "0"}
    bash(block("docs/install.md", "pip wheel"), source, building)
    made.wheel = Path(shutil.copy(next((source / "dist").glob("*.whl")), folder))
    first, *rest = block("docs/install.md", "python3 -m venv venv").splitlines()
    bash(first.replace("python3", sys.executable, 1), folder, env)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    for old in packages.glob("setuptools*"):  # older than torch wants; the newer one is among the downloaded ones
        shutil.rmtree(old)
    extras = re.findall(r"whl\[(.+?)\]", "\n".join(rest))[0].split(",")
    there = _downloaded(folder / "downloaded", [*extras, "hydra"])  # docs/hydra.md has one more
    (packages / "downloaded.pth").write_text(f"{there}\n")
    torchrun = folder / "venv" / "bin" / "torchrun"  # of the downloaded packages, the one whose program is needed
    torchrun.write_text(f"#!{torchrun.parent}/python\nfrom torch.distributed.run import main\n\nmain()\n")
    torchrun.chmod(0o755)
    made.said = bash("\n".join(rest), folder, env)
    return made
