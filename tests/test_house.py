"""Checks the repository itself: layout, imports, classes, packages and texts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("strategies", "callbacks", "configs")
OURS = (
    "chaos_lightning", *LINKED, "examples", "benchmarks", "docs", "tests", ".ci",
    "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt", "mkdocs.yml", "pyproject.toml",
)  # fmt: skip
GENERATED = re.compile(r"chaos_pb2(_grpc)?\.pyi?$")
SUFFIXES = {".py", ".md", ".txt", ".toml", ".yaml", ".yml", ".proto", ".svg", ".json", ""}


@cache
def sources() -> list[Path]:
    """Returns all text files of the project, without following symlinked folders."""
    found: list[Path] = []
    for name in OURS:
        top = ROOT / name
        if top.is_file():
            found.append(top)
        for folder, subfolders, files in os.walk(top):
            subfolders[:] = [s for s in subfolders if s != "__pycache__" and not s.startswith(".")]
            found += [Path(folder, f) for f in files if Path(f).suffix in SUFFIXES]
    return sorted(found)


def python_files() -> list[Path]:
    return [p for p in sources() if p.suffix == ".py" and not GENERATED.search(p.name)]


@cache
def text(path: Path) -> str:
    return path.read_text()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT, **options)  # type: ignore[call-overload]


# ------------------------------------------------------------------------------------------------ layout


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_a_relative_symlink_inside_the_package(name: str) -> None:
    link = ROOT / "chaos_lightning" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKED)
def test_folder_refuses_its_short_name_and_says_the_right_one(name: str) -> None:
    done = run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}")
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"import chaos_lightning.{name}" in done.stderr


LIGHT = (
    ("chaos_lightning", "torch lightning numpy grpc hydra"),
    ("chaos_lightning.cli", "torch lightning"),
    (
        "chaos_lightning.cli.plan_command chaos_lightning.planning.pipelines.files "
        "chaos_lightning.cli.profile_command chaos_lightning.pipeline.model_profile",
        "torch lightning numpy grpc matplotlib yaml pydantic",
    ),
    (
        "chaos_lightning.testing.edge.runner chaos_lightning.testing.edge.plot",
        "torch lightning numpy grpc matplotlib yaml",
    ),
    ("chaos_lightning.cli.fleet_command", "torch lightning numpy grpc matplotlib yaml"),
    (
        "chaos_lightning.observe.audit chaos_lightning.observe.report chaos_lightning.observe.commands "
        "chaos_lightning.testing.harness",
        "torch lightning grpc matplotlib",
    ),
    (
        "chaos_lightning.control.scheduler_server chaos_lightning.control.agent chaos_lightning.control.hosting "
        "chaos_lightning.control.scheduler_main chaos_lightning.service.sqlite_store chaos_lightning.control.commands",
        "torch lightning numpy hydra",
    ),
    (
        "chaos_lightning.outer.server.leader_server chaos_lightning.outer.commands.leader_main "
        "chaos_lightning.outer.commands.server_main "
        "chaos_lightning.outer.server.standing chaos_lightning.outer.cluster.server_start "
        "chaos_lightning.outer.commands.ps",
        "torch lightning hydra",
    ),
    ("chaos_lightning.rendezvous.options", "torch"),
)
"""Modules, and what must not have been imported when they and those above them are; from light to heavy."""


def test_light_modules_import_nothing_heavy() -> None:
    code = (
        "import importlib, sys\n"
        f"for modules, heavy in {LIGHT!r}:\n"
        "    for name in modules.split():\n"
        "        importlib.import_module(name)\n"
        "    print(*[f'{modules} imported {m}' for m in heavy.split() if m in sys.modules], sep='\\n', end='')"
    )
    done = run(sys.executable, "-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_documents_copy_folders_so_that_they_replace() -> None:
    """Pages copy key folders with rsync instead of `scp -r`, which would nest the folder on the second copy and leave
    old files in use.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    commands = [line for page in pages for line in page.read_text().splitlines() if line.startswith("    ")]
    assert [line for line in commands if "rsync -a keys/nodes/" in line]
    assert not [line for line in commands if re.search(r"\bscp -\w*r", line)]


def test_test_modules_have_unique_names() -> None:
    """No two test modules have the same name, because pytest would import one of them twice."""
    names = Counter(p.name for p in python_files() if ROOT / "tests" in p.parents and p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


# ------------------------------------------------------------------------------------------------ imports


def modules() -> dict[str, Path]:
    """Returns the files of the package's modules, by import name."""
    found = {}
    for path in python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = ("chaos_lightning", *parts) if parts[0] in LINKED else parts
        if parts[0] == "chaos_lightning":
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def test_no_modules_need_each_other_in_a_circle() -> None:
    """No modules import each other in a cycle, not even for annotations."""
    names, graph = modules(), {}
    for name, path in names.items():
        imports = [n for n in ast.walk(tree(path)) if isinstance(n, ast.ImportFrom)]
        sought = [(f"{node.module}.{alias.name}", node.module) for node in imports for alias in node.names]
        found = {full if full in names else module for full, module in sought}
        graph[name] = {other for other in found & set(names) if other != name}
    assert len(graph) > 100
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a circle


# ------------------------------------------------------------------------------------------------ classes

INTERFACES = ("Store", "TransferPolicy", "ViewPipeliner", "ChaosStrategy", "FitHooks")
"""Classes of ours that others implement in files of their own; exceptions and Protocols beside them. A strategy is
Lightning's interface, and that of pipelines is the other one but for what each member holds. Hooks do nothing of their
own accord."""
MOST_METHODS, MOST_ATTRIBUTES = 55, 40


def product_classes() -> list[tuple[Path, ast.ClassDef]]:
    """Returns the package's classes with their files, except those in testing/."""
    folders = [ROOT / "chaos_lightning", *(ROOT / name for name in LINKED)]
    testing = ROOT / "chaos_lightning" / "testing"
    return [
        (path, node)
        for path in python_files()
        if any(folder in path.parents for folder in folders) and testing not in path.parents and "_pb2" not in path.name
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
    ]


def test_a_public_class_name_means_one_thing() -> None:
    """No two public classes of the package have the same name."""
    public = [node.name for path, node in product_classes() if path.name != "lightning_types.py"]
    counts = Counter(name for name in public if not name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_job_is_done_in_control_and_again_in_outer() -> None:
    """No module of one room has the name of one in the other; what both need is in service/."""
    control, outer = (
        {path.stem for path in (ROOT / "chaos_lightning" / room).rglob("*.py")} for room in ("control", "outer")
    )
    assert control & outer - {"__init__", "events"} == set(), "each room declares its events in an events.py"


def test_no_class_goes_over_several_files() -> None:
    """No class inherits from a class in another file, unless that is an interface."""
    classes = product_classes()
    places = {node.name: path for path, node in classes}
    wrong = []
    for path, node in classes:
        for base in (b.value if isinstance(b, ast.Subscript) else b for b in node.bases):
            name = base.id if isinstance(base, ast.Name) else ""
            if name in places and places[name] != path and name not in INTERFACES and not name.endswith("Error"):
                wrong.append(f"{path.relative_to(ROOT)}: {node.name}({name})")
    assert wrong == []


def test_no_class_knows_everything() -> None:
    large = []
    for path, node in product_classes():
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        attributes = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        attributes |= {
            n.attr
            for method in methods
            for n in ast.walk(method)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"
        }
        if len(methods) > MOST_METHODS or len(attributes) > MOST_ATTRIBUTES:
            large.append(f"{path.relative_to(ROOT)}: {node.name}, {len(methods)} methods, {len(attributes)} attributes")
    assert large == []


# ------------------------------------------------------------------------------------------------ text


def test_modules_tell_what_they_are_for() -> None:
    silent = [str(p.relative_to(ROOT)) for p in python_files() if not ast.get_docstring(tree(p))]
    assert silent == []


def test_nothing_names_a_machine_or_a_loose_end() -> None:
    """Sources contain no paths of a machine, no addresses of package registries, and no notes of open work."""
    words = ["/" + "work/", "/" + "farm/", "/" + "root/", "/" + "tmp/spec", "pypi" + ".org", "pytorch" + ".org/whl"]
    words += ["T" + "ODO", "FIX" + "ME", "X" + "XX"]
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in sources()
        for number, line in enumerate(text(path).splitlines(), 1)
        for word in words
        if word in line
    ]
    assert hits == []


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for path in (p for p in sources() if p.suffix == ".md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text(path)):
            if "://" not in target and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def test_constraints_pin_everything_exactly() -> None:
    lines = [n for n in (ROOT / "constraints.txt").read_text().splitlines() if n and not n.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines), lines
    assert "torch==2.13.0" in lines
    assert not any(line.startswith("chaos") for line in lines)


def test_the_environment_is_the_pinned_one() -> None:
    """The packages with which tests run have the versions in constraints.txt."""
    from importlib.metadata import PackageNotFoundError, version

    differs = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, pinned = line.split("==")
            try:
                here = version(name).partition("+")[0]
            except PackageNotFoundError:
                continue  # a dependency on some platforms only
            if here != pinned:
                differs[name] = (here, pinned)
    assert differs == {}


# ------------------------------------------------------------------------------------------------ make


def test_make_lists_every_target() -> None:
    done = run("make", "--no-print-directory")
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {
        *("help", "env", "demo", "demo-diloco", "demo-edge", "demo-failover", "demo-pipeline"),
        *("test", "test-slow", "compat", "fuzz", "check", "docs", "bench", "size", "proto", "clean"),
    }


def test_gate_fails_when_a_part_fails(tmp_path: Path) -> None:
    """`.ci/run`, with a stand-in for `make`, runs all parts and fails if one of them fails."""
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\nfor target; do :; done\necho "closing line of $target"\n[ "$target" != "$BROKEN" ]\n')
    fake.chmod(0o755)

    def gate(broken: str) -> subprocess.CompletedProcess[str]:
        return run(
            str(ROOT / ".ci/run"), env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "BROKEN": broken}
        )

    good = gate("")
    assert good.returncode == 0
    assert "PASSED: check test" in good.stdout
    for part in ("check", "test"):
        bad = gate(part)
        assert bad.returncode == 1
        assert f"FAILED: {part}" in bad.stdout
        assert bad.stdout.count("closing line of test") == 2
    assert gate("env").returncode != 0


def test_empty_test_selection_is_a_failure() -> None:
    arguments = "ARGS=tests/test_house.py -k no_such_test_at_all"
    done = run("make", "--no-print-directory", "-o", ".venv/.installed", "test", arguments, f"PY={sys.executable}")
    assert done.returncode != 0
    assert "no tests ran" in done.stdout or "deselected" in done.stdout


# ------------------------------------------------------------------------------------------------ packages


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a wheel and an sdist, built without a network."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "hatchling", "build", "-d", str(out))
    assert done.returncode == 0, done.stderr
    return out


def wanted() -> set[str]:
    """Returns the files that every installation must have."""
    files = {
        f"{n}/{p.relative_to(ROOT / n)}" for n in LINKED for p in (ROOT / n).rglob("*") if p.suffix in (".py", ".yaml")
    }
    assert {"strategies/__init__.py", "configs/config.yaml", "configs/accelerator/npu.yaml"} <= files
    return {f for f in files if "__pycache__" not in f}


def test_wheel_holds_the_linked_folders_as_files(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert {f"chaos_lightning/{f}" for f in wanted()} <= names
    assert {"chaos_lightning/protocol/chaos_pb2.py", "chaos_lightning/py.typed"} <= names
    assert all(n.startswith(("chaos_lightning/", "chaos_lightning-")) for n in names)


def test_sdist_can_be_built_into_the_same_wheel(built: Path, tmp_path: Path) -> None:
    archive = next(built.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    tree = next(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")],
        cwd=tree, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = set(zipfile.ZipFile(next((tmp_path / "again").glob("*.whl"))).namelist())
    assert again == set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())


def test_wheel_works_without_the_source_tree(built: Path, tmp_path: Path) -> None:
    """From an unpacked wheel the package can be imported, and Hydra finds its config groups."""
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import chaos_lightning; assert chaos_lightning.__file__.startswith(sys.argv[1]), chaos_lightning.__file__\n"
        "from hydra import compose, initialize_config_module\n"
        "with initialize_config_module('chaos_lightning.configs', version_base='1.3'):\n"
        "    print(compose('config', ['experiment=gpt_text']).model._target_)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "chaos_lightning.examples.models.GPTModule"


@pytest.mark.slow
def test_wheel_installed_by_pip_works_as_users_run_it(built: Path, tmp_path: Path) -> None:
    """A wheel installed by pip into a separate environment, without the editable install, works as users run it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=100)
    binaries, wheel = tmp_path / "venv" / "bin", str(next(built.glob("*.whl")))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def done(*command: str | Path) -> str:
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    python = binaries / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    done(*pip, "--no-deps", "--no-index", wheel)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    trains = (
        "import lightning.pytorch as L, chaos_lightning\n"
        "print(type(L.Trainer(strategy='chaos', accelerator='cpu', logger=False).strategy).__name__)\n"
        "print(chaos_lightning.__file__)"
    )
    strategy, place = done(python, "-c", trains).splitlines()[-2:]
    assert strategy == "ChaosStrategy"
    assert Path(place).is_relative_to(packages)
    assert done(binaries / "chaos-lightning", "--version").startswith(
        f"chaos-lightning {Path(wheel).name.split('-')[1]}\n"
    )
    assert "Usage: python -m chaos_lightning" in done(python, "-m", "chaos_lightning", "--help")
