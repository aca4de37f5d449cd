"""Runs the fuzzer: `python -m lab.fuzz` (docs/fuzzing.md)."""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos_lightning.errors import ConfigurationError
from lab.fuzz.drivers import (
    MEMORY_MIB,
    TARGETS,
    atheris_missing,
    replay,
    told,
    warm,
    with_atheris,
    with_hypothesis,
)
from lab.fuzz.target import limit_memory


def _arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m lab.fuzz", description="Fuzz whatever reads bytes.")
    p.add_argument("--target", default="all", help=f"all, or some with commas: {', '.join(TARGETS)}")
    p.add_argument("--minutes", type=float, default=5.0, help="of all targets together, in each of the jobs")
    p.add_argument("--driver", choices=["hypothesis", "atheris", "both"], default="both")
    p.add_argument("--jobs", type=int, default=1, help="processes at once")
    p.add_argument("--corpus", type=Path, default=Path("fuzz"), help="folder for findings and for atheris's inputs")
    p.add_argument("--memory-mib", type=int, default=MEMORY_MIB, help="what a process may take beyond its start")
    p.add_argument("--replay", type=Path, nargs="*", help="run these files (of --target) and nothing else")
    p.add_argument("--list", action="store_true", help="say what the targets are")
    p.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args()


def _replay(args: argparse.Namespace) -> int:
    if args.target not in TARGETS:
        raise ConfigurationError(f"--replay needs one target: --target {'|'.join(TARGETS)}")
    failed = 0
    for path in args.replay:
        try:
            replay(path, TARGETS[args.target])
            print(f"{path}: nothing found")
        except OSError as error:
            raise ConfigurationError(f"{path}: {error}") from error
        except Exception as error:
            failed += 1
            print(f"{path}: {told(error)}")
    return 1 if failed else 0


def _one(args: argparse.Namespace) -> int:
    """Runs one target under one driver in this process (the driver atheris: in a child process); prints the outcome,
    returns the exit code.
    """
    target, seconds = TARGETS[args.target], args.minutes * 60
    if args.driver == "atheris":
        outcome = with_atheris(target, seconds, args.corpus, memory_mib=args.memory_mib)
    else:
        warm(target)  # before memory is bounded
        limit_memory(args.memory_mib << 20)
        outcome = with_hypothesis(target, seconds, args.corpus)
    print(outcome.line(), *outcome.findings, sep="\n  ", flush=True)
    return 1 if outcome.findings else 0


def main() -> int:
    args = _arguments()
    if args.list:
        for target in TARGETS.values():
            print(f"{target.name:10} {target.about}")
        return 0
    if args.replay is not None:
        return _replay(args)
    if args.one:
        return _one(args)
    names = list(TARGETS) if args.target == "all" else args.target.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown or args.minutes <= 0 or args.jobs < 1:
        raise ConfigurationError(
            f"unknown targets: {', '.join(unknown)}; known: {', '.join(TARGETS)}"
            if unknown
            else "--minutes and --jobs must be positive"
        )
    drivers = ["hypothesis", "atheris"] if args.driver == "both" else [args.driver]
    missing = atheris_missing()
    if missing and "atheris" in drivers:
        if args.driver == "atheris":
            raise ConfigurationError(missing)
        print(f"{missing}: hypothesis alone")
        drivers.remove("atheris")
    work = [(name, driver) for name in names for driver in drivers]
    minutes = args.minutes * args.jobs / len(work)

    def run(item: tuple[str, str]) -> int:
        name, driver = item
        command = [
            *(sys.executable, "-m", "lab.fuzz", "--one"),
            *("--target", name, "--driver", driver, "--minutes", str(minutes)),
            *("--corpus", str(args.corpus), "--memory-mib", str(args.memory_mib)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        print(
            done.stdout.rstrip() or f"{name} {driver} ended with {done.returncode}: {done.stderr[-2000:]}", flush=True
        )
        return done.returncode

    with ThreadPoolExecutor(args.jobs) as pool:
        failed = sum(code != 0 for code in pool.map(run, work))
    print(f"fuzz: {len(work)} runs of {minutes * 60:.0f} s, {failed} with findings (in {args.corpus})")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
