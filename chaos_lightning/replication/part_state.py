"""The training state by parts: what a member of a pipeline holds, serves to others, pulls, hashes and keeps.

Theory of operation. A *part* is a layer, a parameter that several layers share, or the rest (protocol.md, pipelines).
`PartState` is the access to one: its parameters and buffers, and what optimizers keep for these parameters, by name and
not by position, since members own different parts. Hyperparameters of groups, schedulers and counters are of the rest
(`ModuleState` with `rest`).

A part at a header is served as a state with a name of its own, `part_name`, beside whatever else a member serves, and
pulled as any state is, with the same proof. Its hash is that of its tensors, so owners compare part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.errors import StateError
from chaos_lightning.protocol.types import GENESIS, Header, ViewId
from chaos_lightning.replication.access import parameter_manifest, parameter_tensors, restore_parameters
from chaos_lightning.replication.bulk import named_head
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.pull import PullReport, pull_state
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.source import Dial, Endpoint
from chaos_lightning.replication.table import StateTable, state_hash


class PartState:
    """`StateAccess` of one part.

    Args:
        part: Its name.
        module: The model, of which other parts may have no memory here.
        names: Names of the part's parameters and buffers; of tied ones, any.
        optimizers: In an order that is equal on all members.
    """

    def __init__(self, part: str, module: nn.Module, names: Collection[str], optimizers: Sequence[Optimizer]) -> None:
        self.part = part
        self._module, self._names, self._optimizers = module, frozenset(names), tuple(optimizers)

    def _parameters(self) -> list[tuple[str, Tensor]]:
        """Each once, under its first name in the model, whichever of its names were given."""
        given = {id(p) for n, p in self._module.named_parameters(remove_duplicate=False) if n in self._names}
        return [(n, p) for n, p in self._module.named_parameters() if id(p) in given]

    def _buffers(self) -> list[tuple[str, Tensor]]:
        given = {id(b) for n, b in self._module.named_buffers(remove_duplicate=False) if n in self._names}
        return [(n, b) for n, b in self._module.named_buffers() if id(b) in given]

    def tensors(self) -> list[tuple[str, Tensor]]:
        parameters = self._parameters()
        named = [(f"param.{n}", p) for n, p in parameters] + [(f"buffer.{n}", b) for n, b in self._buffers()]
        return named + parameter_tensors(self._optimizers, parameters)

    def volatile(self) -> list[str]:
        """Names of tensors that a forward pass may write: a donor that goes on has to serve copies of these."""
        return [f"buffer.{n}" for n, _ in self._buffers()]

    def manifest(self) -> dict[str, object]:
        return {"part": self.part, "optimizers": parameter_manifest(self._optimizers, self._parameters())}

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        self.adopt(manifest)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        if manifest["part"] != self.part:
            raise StateError(f"the donor gave part {manifest['part']!r} of the training state; expected {self.part!r}")
        restore_parameters(self._optimizers, self._parameters(), manifest["optimizers"])

    def forget(self) -> None:
        """Lets go of what optimizers keep for this part, which another member owns from now on."""
        for optimizer in self._optimizers:
            for _, parameter in self._parameters():
                optimizer.state.pop(parameter, None)


# ------------------------------------------------------------------------------------------------ serving and pulling


def part_name(header: Header, part: str, view: ViewId | None = None) -> str:
    """Name under which a part of the state at a header is served.

    Args:
        header: The committed header.
        part: Name of the part.
        view: The view that makes GENESIS's parts, since that header does not tell one state from another; else None.
    """
    assert (view is not None) == (header.hash == GENESIS.hash), "a view is named at GENESIS, and there alone"
    return f"{header.hash}/{part}" if view is None else f"{view}/{part}"


class PartServer:
    """Serves this member's parts at one header, until their owners go on.

    Args:
        server: Serves this member's states.
    """

    def __init__(self, server: StateServer) -> None:
        self._server = server
        self._held: list[str] = []

    def hold(self, header: Header, parts: Iterable[PartState], view: ViewId | None = None) -> None:
        """Serves these parts, whose buffers are those of the header, in place of all others.

        They must be still until `drop`, but for buffers, which are copied. Call it before the rest is published: who
        asks earlier waits for the parts.
        """
        self.drop()
        for state in parts:
            name = part_name(header, state.part, view)
            self._server.hold(name, header.seq, state.tensors(), state.manifest(), copies=state.volatile())
            self._held.append(name)

    def drop(self) -> None:
        """Serves them no more: the optimizer may write to them."""
        for name in self._held:
            self._server.drop(name)
        self._held.clear()


def pull_part(
    donors: Sequence[Endpoint],
    dial: Dial,
    header: Header,
    state: PartState,
    *,
    view: ViewId | None = None,
    config: PullConfig | None = None,
    abandoned: Callable[[], bool] | None = None,
    loading: frozenset[str] = frozenset(),
) -> PullReport:
    """Pulls a part of the state at a header, and proves it by its hash; other parts stay as they are.

    Args:
        donors: Members that hold it, the oldest first.
        dial: Opens an authenticated bulk connection.
        header: The committed header.
        state: The part here; its tensors have memory.
        view: As of `part_name`.
        config: Waits and sizes.
        abandoned: Says whether the pull has become pointless.
        loading: Donors that get the part themselves.

    Raises:
        StateError, DeadlineError: As `pull_state`.
    """
    head = named_head(part_name(header, state.part, view))
    return pull_state(
        donors, dial, head=head, seq=header.seq, state=state, config=config, abandoned=abandoned, loading=loading
    )


def part_hashes(parts: Iterable[PartState]) -> dict[str, str]:
    """Hash of the tensors of each part, by name: equal exactly where they are (protocol.md 24)."""
    return {state.part: state_hash(state.tensors()) for state in parts}


__all__ = ["PartServer", "PartState", "part_hashes", "part_name", "pull_part"]
