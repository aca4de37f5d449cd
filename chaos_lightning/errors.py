"""Defines the exceptions of the package: a common base, and subclasses by what a user can do about them."""

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
    """Base class of the exceptions that this package raises on purpose, except those that end the process."""


class ConfigurationError(ChaosError, ValueError):
    """Error that a setting or call of the user cannot work; the text says what was given, what was expected and what to
    do.
    """


class UnsupportedError(ConfigurationError):
    """Error that a feature of PyTorch or Lightning is not supported."""


class MissingExtraError(ConfigurationError, ImportError):
    """Error that a package of an optional extra is not installed; the text says what needs it and what to run."""


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Context manager that turns a failed import of an optional package into MissingExtraError.

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
    """Error that the scheduler or a neighbour refused this member, because of its token, name, version or settings, or
    a finished job.
    """


class FinishedJobError(SystemExit):
    """Exit of a process that came when its job was finished, and could not load the final weights.

    Uncaught it ends the process with exit code 0, which launchers take for success. It is no ChaosError, and none that
    `except Exception` catches: what a script does behind fit would be done with other weights than the job's.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = 0


class DisagreementError(ChaosError):
    """Error that members disagree: this member differs from the others (the text names the field and both values), or
    no member can go on because what they gather does not fit together or into one message.
    """


class FencedError(ChaosError):
    """Error that a view excludes this member, whose training state is void; it may join again."""


class NotNowError(FencedError):
    """Error that this newcomer was admitted at a point where it cannot begin; it leaves and joins again."""


class DepartedError(ChaosError):
    """Error that this member was let go, because it asked to leave or the job is finished; it commits nothing any
    more.
    """


class LeftJobError(SystemExit):
    """Exit of `fit` before training was over, because this process was asked to leave the job.

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
    """Error that a script ended before its model was measured; the text says after how many steps, or why there were
    none.
    """


class SchedulerUnreachableError(ChaosError):
    """Error that no scheduler answered within the deadline."""


RESTART_CODE = 79
"""Exit code of a process whose job has ended for all, and is to be started again."""


class RestartError(SystemExit):
    """Exit of all members of a job that cannot continue and is to be started again from a checkpoint.

    It says why, and names the newest checkpoint that a member told of. Uncaught it ends the process with exit code
    RESTART_CODE, at which torchrun and `chaos-lightning run` start the process again.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = RESTART_CODE


class DryRunError(SystemExit):
    """Exit of `fit` in a dry run, which trains nothing; the process's exit code is 0."""

    def __init__(self) -> None:
        super().__init__("a dry run trains nothing")
        self.code = 0


class AttemptOverError(ChaosError):
    """Error that an attempt at a slot was ended by a recovery; its units run again in the next attempt."""


class DeadlineError(ChaosError):
    """Error that a wait timed out; the text says who waited for what, and what to do."""


class WireError(ChaosError):
    """Error that received bytes are no valid message: wrong magic, length or checksum, unknown type, or a field beyond
    its limits.
    """


class StateError(ChaosError):
    """Error that a piece of training state, named in the text, cannot be sent or does not fit here."""


class NoDonorError(StateError):
    """Error that no donor of the training state is left; the text says what became of each.

    Attributes:
        refused: Whether one of them answered that it does not have it.
    """

    def __init__(self, words: str, *, refused: bool = False) -> None:
        super().__init__(words)
        self.refused = refused


class PlanError(ConfigurationError):
    """Error about a plan that does not span all members, has a cycle or does not cover every byte exactly once."""


class StoreError(ChaosError):
    """Error that the coordination store refused an operation, or failed."""


class OversizeError(StoreError):
    """Error that a record is too large for the coordination store.

    Attributes:
        fits: Number of members of the view that would fit; 0: the record is no view's.
    """

    def __init__(self, message: str, fits: int = 0) -> None:
        super().__init__(message)
        self.fits = fits
