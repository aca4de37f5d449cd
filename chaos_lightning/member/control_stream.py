"""Keeps a member's control stream to the scheduler open as long as its process runs.

Theory of operation. An `Agent` holds one conversation from hello to goodbye; who begins anew has another one, and the
stream stays the same to all who speak over it. Before it is opened, and between two agents, what is sent is dropped, as
it is while a stream is broken: the member machine says again what still matters. What the scheduler says goes to the
I/O thread, and to `Waiting`, which shows it. A welcome also tells which of this member's settings do not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from chaos_lightning.control.agent import Agent
from chaos_lightning.control.hosting import host_for_engine
from chaos_lightning.member.hello import unheeded
from chaos_lightning.member.mailbox import Mailbox
from chaos_lightning.member.shell import Shell
from chaos_lightning.member.waiting import Waiting
from chaos_lightning.protocol.types import FromMember, Hello, ToMember, Welcome
from chaos_lightning.security.credentials import Secret
from chaos_lightning.settings import EngineConfig

_log = logging.getLogger("chaos_lightning")


class ControlStream:
    """Control stream between one member and the scheduler.

    Args:
        config: Configuration with the schedulers' endpoints and the time to look for one.
        token: Cluster token (empty for none), or credentials.
        mail: Mailbox that is told that the stream failed for good.
        waiting: Receives the scheduler's messages and the state of the stream.
    """

    def __init__(self, config: EngineConfig, token: Secret, mail: Mailbox, waiting: Waiting) -> None:
        self._config = config
        self._token = token
        self._mail = mail
        self._waiting = waiting
        self._agent: Agent | None = None
        self._unheeded: list[str] = []

    def open(self, shell: Shell, hello: Callable[[], Hello]) -> None:
        """Opens the stream and says hello, unless it is open already.

        Args:
            shell: Takes what the scheduler says.
            hello: Makes the Hello of each connection.
        """
        if self._agent is not None:
            return
        self._agent = Agent(
            endpoints=self._config.endpoints,
            token=self._token,
            hello_factory=hello,
            on_message=lambda message: self._hear(shell, message),
            on_state=self._on_state,
            heartbeat=shell.heartbeat,
            connect_timeout_s=self._config.join_timeout_s,
            revive=lambda: host_for_engine(self._config, continue_only=True, chain=shell.machine.chain),
        )
        self._agent.start()

    def send(self, message: FromMember) -> None:
        """Sends `message` soon, if the stream is connected; any thread."""
        agent = self._agent
        if agent is not None:
            agent.send(message)

    def close(self) -> None:
        """Says goodbye and closes the stream, which `open` can open again. Idempotent."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _hear(self, shell: Shell, message: ToMember) -> None:
        if isinstance(message, Welcome):
            before, self._unheeded = self._unheeded, unheeded(self._config, message)
            for line in self._unheeded:
                if line not in before:
                    _log.warning("%s", line)
        self._waiting.hear(message)
        shell.loop.call(lambda: shell.control(message))

    def _on_state(self, state: str) -> None:
        self._waiting.stream(state)
        if state.startswith("failed"):
            self._mail.post(ejected=(state, False))
