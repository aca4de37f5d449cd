"""Simulated processes of a service: a host that leads, its clients, and the streams between them, in virtual time.

Theory of operation. A stream has an ordered pipe in each direction. One that is cut loses what is on its way; each end
notices after a while, and a client may be back before its host knows that it was gone. A client looks for the host that
leads, and repeats on each new stream what matters. Both may be killed between any two effects of their machines. What
they say, hear and do is their own: subclasses are the roles of a simulated job.
"""

from __future__ import annotations

from typing import Any, Protocol

from chaos_lightning.planning.fleet.kernel import Kernel, Pipe, Process


class SimWorld(Protocol):
    """Interface of a simulated job for its clients."""

    @property
    def host(self) -> SimHost | None:
        """Host that leads; None if none does."""

    def number(self) -> int:
        """Returns a number that no earlier call returned."""


class SimStream:
    """Connection of a client to a host.

    Args:
        number: Number by which the host knows it.
        client: The client.
        host: The host.
        lag_s: Seconds that are added to each latency on the way to the host.
    """

    def __init__(self, number: int, client: SimClient, host: SimHost, lag_s: float = 0.0) -> None:
        kernel = client.kernel
        self.conn, self.since = number, kernel.now
        self.client, self.host = client, host
        self.up = Pipe(kernel, 0.0005, 0.02, lag=lag_s)
        self.down = Pipe(kernel, 0.0005, 0.02)

    def to_host(self, message: Any) -> None:
        """Takes a message that has arrived at the host's machine."""
        self.host.deliver(lambda: self.host.heard(self, message) if self.conn in self.host.streams else None)

    def to_client(self, message: Any) -> None:
        """Takes a message that has arrived at the client's machine."""
        self.client.deliver(lambda: self.client.told(self, message))

    def cut(self, *, proof: bool = False) -> None:
        """Cuts the stream: each end notices it after a while, and messages on their way may be lost.

        Args:
            proof: Whether the host can prove that the client's process is dead.
        """
        kernel = self.client.kernel
        # The client may be back before its host knows that the stream is gone, or has heard all that it said there.
        noticed_s = kernel.between(0.02, 0.3)
        self.up.cut(kernel.now + kernel.between(0.0, noticed_s))
        self.down.cut(kernel.now + kernel.between(0.0, 0.01))
        kernel.after(noticed_s, lambda: self.host.deliver(lambda: self.host.closed(self, proof)))
        kernel.after(kernel.between(0.011, 0.05), lambda: self.client.deliver(lambda: self.client.lost(self)))


class Mortal(Process):
    """Process that may be killed just before one of its effects.

    Attributes:
        die_at_effect: Number of effects after which it is killed; -1: it is not.
    """

    die_at_effect = -1

    def dies(self) -> bool:
        """Kills the process if a planned death is due before the next effect; returns whether it is dead."""
        if self.die_at_effect == 0:
            self.kill()
        self.die_at_effect -= 1
        return not self.alive

    def kill(self) -> None:
        """Kills the process by SIGKILL."""
        raise NotImplementedError


class SimHost(Mortal):
    """Process of a host, from its start to its death.

    Attributes:
        streams: Streams that stand, by number.
    """

    repeats = 0.0
    """Share of messages that arrive twice."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        super().__init__(kernel, name)
        self.streams: dict[int, SimStream] = {}

    def tell(self, conn: int, message: Any) -> None:
        """Sends a message on a stream, if it stands."""
        stream = self.streams.get(conn)
        if stream is not None:
            for _ in range(1 + (self.repeats > 0 and self.kernel.random.random() < self.repeats)):
                stream.down.send(message, stream.to_client)

    def closed(self, stream: SimStream, proof: bool) -> None:
        """Notices that a stream has ended."""
        if self.streams.pop(stream.conn, None) is not None:
            self.left(stream, proof)

    def kill(self) -> None:
        """Kills the host by SIGKILL."""
        if self.alive:
            self.die()
            for stream in list(self.streams.values()):
                stream.cut()
            self.killed()

    def heard(self, stream: SimStream, message: Any) -> None:
        """Takes a message of a client."""
        raise NotImplementedError

    def left(self, stream: SimStream, proof: bool) -> None:
        """Takes the end of a stream."""
        raise NotImplementedError

    def killed(self) -> None:
        """Reacts to the host's death."""


class SimClient(Mortal):
    """Process of a client, which looks for the host that leads.

    Args:
        kernel: Kernel with time and chance.
        name: Name of the process.
        world: The job.

    Attributes:
        stream: Stream to the host; None if none stands.
        cut_at: Time (s) at which the last stream was lost.
    """

    repeats = 0.0
    """Share of messages that arrive twice."""

    def __init__(self, kernel: Kernel, name: str, world: SimWorld) -> None:
        super().__init__(kernel, name)
        self.stream: SimStream | None = None
        self.cut_at = 0.0
        self._world = world

    def connect(self) -> None:
        """Connects to the host that leads; tries again until it works."""
        host = self._world.host
        if self.stream is not None or not self.alive:
            return
        if host is None or not host.alive:
            self.timer(self.kernel.between(0.05, 0.2), self.connect)
            return
        stream = self.stream = SimStream(self._world.number(), self, host, self.lag_s())
        host.streams[stream.conn] = stream
        self.begun()

    def lag_s(self) -> float:
        """Returns the seconds that are added to the latency of a new stream."""
        return 0.0

    def say(self, message: Any) -> None:
        """Says something to the host, if a stream stands."""
        stream = self.stream
        if stream is not None:
            for _ in range(1 + (self.repeats > 0 and self.kernel.random.random() < self.repeats)):
                stream.up.send(message, stream.to_host)

    def lost(self, stream: SimStream) -> None:
        """Notices that a stream is gone; looks for the host again."""
        if self.stream is stream:
            self.stream, self.cut_at = None, self.kernel.now
            self.ended()
            self.timer(self.kernel.between(0.01, 0.2), self.connect)

    def told(self, stream: SimStream, message: Any) -> None:
        """Takes what the host says on a stream."""
        if self.stream is stream:
            self.hear(message)

    def listen(self, silent_s: float) -> None:
        """Cuts the stream to a host that has been frozen for so long, since another may lead by now."""
        stream = self.stream
        if stream is not None and stream.host.frozen and self.kernel.now - stream.host.frozen_since > silent_s:
            stream.cut()

    def kill(self) -> None:
        """Kills the process by SIGKILL."""
        if self.alive:
            self.die()
            if self.stream is not None:
                self.stream.cut(proof=self.kernel.random.random() < 0.7)
            self.killed()

    def begun(self) -> None:
        """Reacts to a new stream."""

    def ended(self) -> None:
        """Reacts to the end of a stream."""

    def hear(self, message: Any) -> None:
        """Takes a message of the host."""
        raise NotImplementedError

    def killed(self) -> None:
        """Reacts to the process's death, for example by starting it again."""
