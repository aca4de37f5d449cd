"""What frames each of the Trainer's functions: afterwards the Trainer says whether fit was interrupted.

Theory of operation. A member that leaves (Ctrl+C, SIGTERM, a drain, ChaosExit) ends fit politely, in the middle of it,
and fit returns. Lightning then calls it finished, since it knows no other end without an exception; so the word is
given after it, here. `trainer.interrupted` is True, as after a Ctrl+C without the strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerStatus

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from chaos_lightning.strategies.strategy import ChaosStrategy


class Launcher(_Launcher):
    """Calls the function in this very process: members are started from outside."""

    def __init__(self, strategy: ChaosStrategy) -> None:
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        session = self._strategy.session
        if trainer is not None and session is not None and session.departed:
            trainer.state.status = TrainerStatus.INTERRUPTED
            # Not sooner: Lightning aborts where it reads this within fit.
            trainer._signal_connector.received_sigterm |= session.terminated
        return result

    def kill(self, signum: Any) -> None:
        """There are no processes of ours."""
