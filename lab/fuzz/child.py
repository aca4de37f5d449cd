"""Runs the fuzzer atheris on one target in a process of its own: `python -m lab.fuzz.child TARGET ...`."""

from __future__ import annotations

import os
import sys
from random import Random


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["chaos_lightning"], enable_loader_override=False):
        from lab.fuzz.drivers import TARGETS
        from lab.fuzz.target import guarded, limit_memory

    target = TARGETS[sys.argv[1]]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        changed = target.mutate(data, rng) if rng.randint(0, 7) else atheris.Mutate(data, max_size)
        return changed[:max_size]

    def once(data: bytes) -> None:
        guarded(target, data, traced=False)

    for seed in target.seeds():
        once(seed)
    limit_memory(int(os.environ.get("CHAOS_FUZZ_MEMORY_MIB", "1024")) << 20)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], once, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
