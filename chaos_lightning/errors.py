"""Exceptions of the package: one root, one branch for each thing a reader can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "lightning": "lightning",
    "hydra": "hydra",
    "omegaconf": "hydra",
    "sklearn": "examples",
    "prometheus_client": "prometheus",
    "opentelemetry": "otel",
    "opentelemetry.exporter": "otel",
    "opentelemetry.exporter.otlp.proto.grpc": "otel",
}
"""Extra of ours that brings a package, by the name of the package that is imported. OpenTelemetry may be there in
part.
"""


class ChaosError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigurationError(ChaosError, ValueError):
    """Error about a request of the user that cannot work; says what was given, what was expected, what to do."""


class UnsupportedError(ConfigurationError):
    """Error about a feature of the host framework that this package refuses by name instead of doing it wrong."""


class MissingExtraError(ConfigurationError, ImportError):
    """Error about a package that is missing, which an extra of ours brings; says what needs it, which package, and what
    to run.
    """


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Explains imports that fail while the block runs, if an extra is not installed.

    Args:
        what: Feature that the user asked for.

    Raises:
        MissingExtraError: A package of `EXTRAS` is not there; other failed imports stay as they are.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise MissingExtraError(
            f"{what} needs the package {error.name}, which is not installed; run: "
            f'pip install "chaos-lightning[{EXTRAS[error.name]}]"'
        ) from error


class RefusedError(ChaosError):
    """Error that the scheduler (or a neighbour) did not let this member in: token, name, version, fingerprint, finished
    job.
    """


class FinishedJobError(SystemExit):
    """End of a process without which the job was finished: it has nothing to train, and not the final weights either.

    Uncaught it ends the process with exit code 0, which launchers take for success. It is no ChaosError, and none that
    `except Exception` catches: what a script does behind fit would be done with other weights than the job's.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 0


class DisagreementError(ChaosError):
    """Error that members disagree: this one differs from the others and is put out (the message names the field and
    both values), or nobody can go on, since they gather more than fits into one message or values that do not fit
    together.
    """


class FencedError(ChaosError):
    """Error that this member was excluded by a decided view; its training state is void and it may join again."""


class NotNowError(FencedError):
    """Error that this newcomer was let in where it cannot begin; it leaves, and comes again."""


class DepartedError(ChaosError):
    """Error that this member was let go (it asked to leave, or the job is finished): nothing more commits here."""


class LeftJobError(SystemExit):
    """End of `fit` before the training was over: this process was asked to leave the job, and did.

    It ends the program without a traceback, as Lightning's own end at Ctrl+C does, and `except Exception` lets it pass:
    code behind `fit` would take half a training for a whole one, and a sweep would start its next run. Catch it by name
    to go on all the same. docs/ends.md has the exit codes.

    Attributes:
        step: Last optimizer step that this process took part in.
    """

    def __init__(self, code: int, step: int) -> None:
        super().__init__(code)
        self.step = step


class ProfileError(ChaosError):
    """Error that a script ended before its model was measured; says after how many steps, or why there was none."""


class SchedulerUnreachableError(ChaosError):
    """Error that no scheduler answered within the deadline."""


RESTART_CODE = 79
"""Exit code of a process whose job has ended for all, and is to be started again."""


class RestartError(SystemExit):
    """End of a job for all its members without being finished, since it cannot go on: start it again.

    It says why, and names the newest checkpoint that a member told of. Uncaught it ends the process with exit code
    RESTART_CODE, at which torchrun and `chaos-lightning run` start the process again.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = RESTART_CODE


class DryRunError(SystemExit):
    """End of `fit` in a dry run: it has said what it would do, and has trained nothing. The process ends with exit code
    0.
    """

    def __init__(self) -> None:
        super().__init__("a dry run trains nothing")
        self.code = 0


class AttemptOverError(ChaosError):
    """Error that an attempt at a slot has ended at a recovery: nothing of it counts any more, and its units run
    again.
    """


class DeadlineError(ChaosError):
    """Error that a wait ended without its event; names node, link, step, what was expected and what to do."""


class WireError(ChaosError):
    """Error about bytes that are no frame of ours: magic, length, checksum, unknown type or field out of limits."""


class StateError(ChaosError):
    """Error about training state that cannot travel or does not fit; names the piece."""


class NoDonorError(StateError):
    """Error that no donor of the training state can be reached any more; says what became of each.

    Attributes:
        refused: Whether one of them answered that it does not have it.
    """

    def __init__(self, words: str, *, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused


class PlanError(ConfigurationError):
    """Error about a plan that does not span all members, has a cycle or does not cover every byte exactly once."""


class StoreError(ChaosError):
    """Error that the coordination store refused or failed."""


class OversizeError(StoreError):
    """Error about a record that is larger than coordination stores take.

    Attributes:
        fits: Number of members of the view that would fit; 0: the record is no view's.
    """

    def __init__(self, message: str, fits: int = 0) -> None:
        super().__init__(message)
        self.fits = fits
