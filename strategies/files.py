"""Keeps the log files of a run together when another member becomes the writer (writer.py).

Theory of operation. The writer tells its loggers' versions, and the next one takes them: it opens the same folder, and
W&B the same run. Clusters of an outer job tell each other nothing, but know the job's id, which is the run's id with
them: the next one looks for the folder with that id in which a writer has begun last. Where the next writer is on
another machine, with a file system of its own, a folder of that name may be another run's; so the writer leaves the
run's id in a file in its folder, `RUN_FILE`. Only a folder with that id is gone on with, a new one is made under the
same name, and any other one is left alone for one named after the member. The file names the writer, too: one that was
frozen and put out looks there before it writes, and finds the next one.

Each step is to be logged once. Lightning's writer of metrics.csv deletes the file when it opens one that exists;
`_Continued` keeps it, and leaves out rows that it has. What other loggers have written is not known, so with them the
next writer makes up for what the one before has certainly not written, and no more.
"""

from __future__ import annotations

import contextlib
import csv
import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only

RUN_FILE = ".chaos_run"
KNOWN_ROWS = 200
"""Number of last rows of a metrics.csv that are compared with what is logged; two commits make fewer final."""
Version = int | str
"""Version of a logger; "" where the user names the whole folder."""


class LogPlace(NamedTuple):
    """Member that writes the logs, and the folder, run and versions with which it does so."""

    writer: str = ""
    """Member id of the writer; "": no writer has told yet."""
    folder: str = ""
    """`trainer.log_dir` of the writer."""
    run: str = ""
    """Mark of the writer's folders; the same for all writers of a run."""
    versions: Sequence[Version | None] = ()
    """Versions of the writer's loggers, in order; None where another writer cannot go on with one."""


@dataclass(frozen=True, slots=True)
class Call:
    """Delayed call of a logger's `log_metrics`."""

    logger: Logger
    real: Callable[..., None]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def make(self) -> None:
        self.real(*self.args, **self.kwargs)


def versions(loggers: Sequence[Logger]) -> list[Version | None]:
    """Returns the versions of these loggers, which the next writer's loggers continue."""
    known = (CSVLogger, TensorBoardLogger, WandbLogger)
    return [logger.version if isinstance(logger, known) else None for logger in loggers]


def mark(loggers: Sequence[Logger], run: str, writer: str) -> str:
    """Marks the log folders of this writer's loggers with the run's id and this member's id.

    Args:
        loggers: Loggers, all open.
        run: Run of the previous writer; "": this is the first one.
        writer: Id that tells this member from others.

    Returns:
        The run's id.
    """
    run = run or uuid.uuid4().hex
    for logger in loggers:
        if _in_folder(logger) and os.path.isdir(folder := str(logger.log_dir)):
            _mark(folder, run, writer)
    return run


def _mark(folder: str, run: str, writer: str) -> None:
    beside = Path(folder, f"{RUN_FILE}.{writer}")
    with contextlib.suppress(OSError):  # a writer that cannot read it later takes another folder
        beside.write_text(f"{run} {writer}")
        os.replace(beside, Path(folder, RUN_FILE))  # a writer that dies meanwhile leaves a whole one


def taken_over(loggers: Sequence[Logger], writer: str) -> bool:
    """Returns whether another member has become the writer of one of these log folders: a member that was frozen may
    not know it yet.
    """
    folders = [str(logger.log_dir) for logger in loggers if _in_folder(logger)] if rank_zero_only.rank == 0 else []  # type: ignore[attr-defined]
    return any(_marked(folder)[1] not in ("", writer) for folder in folders)


@rank_zero_only
def save(logger: Logger) -> None:
    """Writes a logger's files if that is cheap; other loggers write when they choose to."""
    if _in_folder(logger):
        logger.save()


def forget(logger: Logger) -> None:
    """Drops what a logger has not written yet: this member was put out of the job, and another member writes the
    files.
    """
    if isinstance(logger, CSVLogger | TensorBoardLogger):
        logger._experiment = None


def go_on(logger: Logger, version: Version | None, run: str, name: str, writer: str) -> bool:
    """Makes this member's logger continue the files or the run of the previous writer's logger.

    Args:
        logger: Logger of the trainer, not open or left open when this member was the writer before.
        version: Version of the other's logger; None: it was not told, and is looked for.
        run: Run with which the other's folder is marked; "": it is not known either.
        name: This member's name.
        writer: Id that tells this member from others; "": the previous writer leaves, and has something to write still.

    Returns:
        Whether the logger leaves out what the other has written.
    """
    version = version if version is not None else _marked_last(logger, run)
    if version is not None and isinstance(logger, WandbLogger):
        logger._id = logger._wandb_init["id"] = version
    elif version is not None and isinstance(logger, CSVLogger | TensorBoardLogger):
        logger._version, logger._experiment = version, None
        folder = str(logger.log_dir)
        there = logger._fs.isdir(folder)
        if there and _in_folder(logger) and _marked(folder)[0] != run:
            _own_folder(logger, name)
        elif there:
            if writer and _in_folder(logger):
                _mark(folder, run, writer)
            if isinstance(logger, CSVLogger):
                logger._experiment = _Continued(folder, KNOWN_ROWS if writer else 0)
                return True
    else:
        _own_folder(logger, name)
    return False


def catch_up(logger: Logger, owed: Sequence[Call]) -> None:
    """Logs the calls that the previous writer may not have written, except rows that the continued file already has."""
    for call in owed:
        call.make()
    save(logger)
    if isinstance(experiment := getattr(logger, "_experiment", None), _Continued):
        experiment.there.clear()  # what comes now is new, also where rows without a step look alike


def _in_folder(logger: Logger) -> bool:
    return isinstance(logger, CSVLogger | TensorBoardLogger) and _is_local_file_protocol(logger.log_dir)


def _marked(folder: str) -> tuple[str, str]:
    """Reads the run's id and the writer's id from the mark in a folder; "" and "" if it has none."""
    try:
        run, _, writer = Path(folder, RUN_FILE).read_text().partition(" ")
    except OSError:
        return "", ""
    return run, writer


def _marked_last(logger: Logger, run: str) -> Version | None:
    """Returns the version whose folder was marked last by a writer of this run; None if this machine has none."""
    if not run or not isinstance(logger, CSVLogger | TensorBoardLogger) or not _in_folder(logger):
        return None
    root = Path(os.path.expandvars(logger.root_dir)).expanduser()
    if not root.is_dir():
        return None
    own, newest, found = logger._version, -1, ""
    try:
        for folder in root.iterdir():
            logger._version = folder.name
            if _marked(place := str(logger.log_dir))[0] == run:
                with contextlib.suppress(OSError):
                    if (marked_at := Path(place, RUN_FILE).stat().st_mtime_ns) > newest:
                        newest, found = marked_at, folder.name
    finally:
        logger._version = own
    number = found.removeprefix("version_")
    return int(number) if number.isdecimal() and found == f"version_{int(number)}" else found or None


class _Continued(ExperimentWriter):
    """Writer of metrics.csv that appends to an existing file.

    Args:
        log_dir: Folder of the file.
        known: Number of its last rows that are not written once more.

    Attributes:
        there: Step and names of values of each of these rows.
    """

    def __init__(self, log_dir: str, known: int) -> None:
        super().__init__(log_dir)
        self.there: deque[tuple[str, frozenset[str]]] = deque(maxlen=known)
        self._last = -1
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                rows = csv.DictReader(file)
                self.metrics_keys = list(rows.fieldnames or ())
                self.there.extend(_key(row) for row in rows)
            self._last = max((int(step) for step, _ in self.there if step.isdecimal()), default=-1)

    def _check_log_dir_exists(self) -> None:
        """Overrides Lightning's check, which would delete the existing file."""

    def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
        if step is not None and step > self._last:
            self.there.clear()  # all that follows is new
        if _key(self.metrics[-1]) in self.there:
            self.metrics.pop()


def _key(row: Mapping[str, Any]) -> tuple[str, frozenset[str]]:
    return str(row.get("step")), frozenset(name for name, value in row.items() if value != "")


def _own_folder(logger: Logger, name: str) -> None:
    """Gives a logger a new folder if its present one belongs to another run: a file logger empties the folder that
    it opens.
    """
    folder = getattr(logger, "log_dir", None)
    if hasattr(logger, "_version") and hasattr(logger, "_experiment") and folder and os.path.isdir(folder):
        version = logger.version
        logger._version = f"version_{version}-{name}" if isinstance(version, int) else f"{version}-{name}".lstrip("-")
        logger._experiment = None
