"""Deletes what finished jobs have left in the state folder of this machine.

Theory of operation. A scheduler that starts on the default store looks once. Beside its own chain it leaves the newest
archived ones. Folders of other jobs go once the job has been finished, and nothing in them was written, for a month: a
finished job keeps no training state but its final one, which goes as soon as newcomers are told of its end no more. A
job that has not finished keeps everything, however old, for its members may come back; so does one whose chain cannot
be read, or whose scheduler lives.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from chaos_lightning.control.job_chain import JobChain
from chaos_lightning.control.options import FINAL
from chaos_lightning.errors import ChaosError
from chaos_lightning.events.events import FORGOTTEN_S
from chaos_lightning.service.sqlite_store import SqliteStore
from chaos_lightning.service.upkeep import remove_unless_served

CHAINS_LEFT = 8


def clean_up(chain: Path, now: float, finished_s: float) -> list[Path]:
    """Deletes archived chains, folders and final states of finished jobs that nobody needs; skips what cannot be
    deleted.

    Args:
        chain: The scheduler's own, in its folder of the state folder.
        now: Wall time, s.
        finished_s: For so long after its end newcomers are told of a finished job.

    Returns:
        What is gone: archived chains of this job, folders of others, final states.
    """
    gone: list[Path] = []
    for final in sorted(chain.parent.parent.glob(f"*/kept/{FINAL}")):
        with contextlib.suppress(OSError):
            if now - final.stat().st_mtime > finished_s and remove_unless_served(final, final):
                gone.append(final)
    with contextlib.suppress(OSError):
        old = sorted(chain.parent.glob(f"{chain.stem}.finished-*{chain.suffix}"), key=lambda p: p.stat().st_mtime)
        for path in old[:-CHAINS_LEFT]:
            path.unlink()
            gone.append(path)
    for folder in sorted(chain.parent.parent.glob("*/")):
        if folder != chain.parent and not folder.is_symlink():
            with contextlib.suppress(OSError, ChaosError):
                if _removes(folder, now):
                    gone.append(folder)
    return gone


def _removes(folder: Path, now: float) -> bool:
    """Deletes a folder if its job finished long ago and no scheduler uses its chain; returns whether it did."""
    chain = folder / "chain.sqlite"
    if not chain.is_file() or now - max(path.stat().st_mtime for path in folder.rglob("*")) <= FORGOTTEN_S:
        return False

    def finished() -> bool:
        with JobChain(SqliteStore(chain, read_only=True)) as store:
            return store.tip().finished

    return remove_unless_served(folder, chain, finished)
