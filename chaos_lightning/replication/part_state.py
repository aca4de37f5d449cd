"""Gives access to the parts of a pipeline's training state, so that a member can serve, pull, hash and keep each part
by itself.

Theory of operation. A *part* is a layer, a parameter that several layers share, or the rest (protocol.md, pipelines).
`PartState` is the access to one: its parameters and buffers, and what optimizers keep for these parameters, by name and
not by position, since members own different parts. Hyperparameters of groups, schedulers and counters are of the rest
(`ModuleState` with `rest`).

A part at a header is served as a state with a name of its own, `part_name`, beside whatever else a member serves, and
pulled as any state is, with the same proof. Its hash is that of its tensors, so owners compare part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chaos_lightning.errors import StateError
from chaos_lightning.membership.parts import REST
from chaos_lightning.protocol.types import GENESIS, Header, ViewId
from chaos_lightning.replication.access import (
    StateAccess,
    parameter_manifest,
    parameter_tensors,
    restore_parameters,
)
from chaos_lightning.replication.bulk import Type, named_head
from chaos_lightning.replication.client import PullConfig
from chaos_lightning.replication.manifest import decode_values
from chaos_lightning.replication.pull import PullReport, pull_state
from chaos_lightning.replication.server import StateServer
from chaos_lightning.replication.session import PullSession
from chaos_lightning.replication.source import Dial, Endpoint
from chaos_lightning.replication.table import DTYPES, StateTable, state_hash


class PartAccess(Protocol):
    """Access (`StateAccess`) to one part of the training state."""

    @property
    def part(self) -> str:
        """Name of the part."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns the part's tensors, as `StateAccess.tensors` does."""

    def volatile(self) -> list[str]:
        """Returns names of the part's tensors that a forward pass may write."""

    def manifest(self) -> dict[str, object]:
        """Returns the part's manifest, as `StateAccess.manifest` does."""

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        """Makes the part's tensors match a donor's table, as `StateAccess.prepare` does."""

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        """Takes over a manifest's values for this part, as `StateAccess.adopt` does."""


class PartState:
    """Access (`PartAccess`) to a layer, or to a parameter that several layers share.

    Args:
        part: Name of the part.
        module: The model, of which other parts may have no memory here.
        names: Names of the part's parameters and buffers; of tied ones, any.
        optimizers: Optimizers, in the same order on all members.
    """

    def __init__(self, part: str, module: nn.Module, names: Collection[str], optimizers: Sequence[Optimizer]) -> None:
        self.part = part
        self._module, self._names, self._optimizers = module, frozenset(names), tuple(optimizers)

    def _parameters(self) -> list[tuple[str, Tensor]]:
        """Returns the part's parameters, each once, by its first name in the model even if another of its names was
        given.
        """
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
        """Returns the names of tensors that a forward pass may write: a donor that trains on must serve copies of
        these.
        """
        return [f"buffer.{n}" for n, _ in self._buffers()]

    def manifest(self) -> dict[str, object]:
        return {"part": self.part, "optimizers": parameter_manifest(self._optimizers, self._parameters())}

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        self.adopt(manifest)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        _check_part(manifest, self.part)
        restore_parameters(self._optimizers, self._parameters(), manifest["optimizers"])

    def forget(self) -> None:
        """Frees the optimizers' state of this part, which another member owns from now on."""
        for optimizer in self._optimizers:
            for _, parameter in self._parameters():
                optimizer.state.pop(parameter, None)


class RestState:
    """Access (`PartAccess`) to the part `rest`: all state that belongs to no single layer; no forward pass changes it.

    Args:
        state: Access to the state that belongs to no single layer.
    """

    part = REST

    def __init__(self, state: StateAccess) -> None:
        self._state = state

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self._state.tensors()

    def volatile(self) -> list[str]:
        return []

    def manifest(self) -> dict[str, object]:
        return self._state.manifest()

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        self._state.prepare(manifest, table)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        self._state.adopt(manifest)


class PartCopy:
    """Access (`StateAccess`) to a copy of a part that was pulled into host memory, without a model.

    It may be pulled again after a pull that failed: what has arrived is not sent once more.

    Args:
        part: Name of the part.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self._named: dict[str, Tensor] = {}

    def tensors(self) -> list[tuple[str, Tensor]]:
        return list(self._named.items())

    def manifest(self) -> dict[str, object]:
        return {"part": self.part}

    def prepare(self, manifest: Mapping[str, Any], table: StateTable) -> None:
        _check_part(manifest, self.part)
        before, self._named = self._named, {}
        for entry in table.entries:
            if not entry.attached:
                shape, dtype, there = entry.shape, DTYPES[entry.dtype], before.get(entry.name)
                fits = there is not None and (tuple(there.shape), there.dtype) == (shape, dtype)
                self._named[entry.name] = there if fits and there is not None else torch.empty(shape, dtype=dtype)

    def adopt(self, manifest: Mapping[str, Any]) -> None:
        _check_part(manifest, self.part)


def _check_part(manifest: Mapping[str, Any], part: str) -> None:
    if manifest["part"] != part:
        raise StateError(f"the donor gave part {manifest['part']!r} of the training state; expected {part!r}")


# ------------------------------------------------------------------------------------------------ serving and pulling


def part_name(header: Header, part: str, view: ViewId | None = None) -> str:
    """Returns the name under which a part of the state at a header is served.

    Args:
        header: The committed header.
        part: Name of the part.
        view: The view that makes GENESIS's parts, since that header does not tell one state from another; else None.
    """
    assert (view is not None) == (header.hash == GENESIS.hash), "a view is named at GENESIS, and there alone"
    return f"{header.hash}/{part}" if view is None else f"{view}/{part}"


class PartServer:
    """Server of this member's parts at one header, until the parts change again.

    Args:
        server: Serves this member's states.
    """

    def __init__(self, server: StateServer) -> None:
        self._server = server
        self._held: list[str] = []

    def hold(
        self,
        header: Header,
        parts: Iterable[PartAccess],
        view: ViewId | None = None,
        *,
        lacking: Iterable[str] = (),
    ) -> None:
        """Serves these parts instead of all that it served before; their buffers are copied, as they are at this
        header.

        They must be still until `drop`, but for buffers, which are copied.

        Args:
            header: The committed header.
            parts: Parts to serve.
            view: The view that makes GENESIS's parts; None at any other header (`part_name`).
            lacking: Names of parts that are not here at this header: whoever asks for one hears so at once.
        """
        self.drop()
        for part in lacking:
            self._server.drop(part_name(header, part, view))
        for state in parts:
            name = part_name(header, state.part, view)
            self._server.hold(name, header.seq, state.tensors(), state.manifest(), copies=state.volatile())
            self._held.append(name)

    def drop(self) -> None:
        """Stops serving the parts, so that the optimizer may write to them."""
        for name in self._held:
            self._server.drop(name)
        self._held.clear()


def pull_part(
    donors: Sequence[Endpoint],
    dial: Dial,
    header: Header,
    state: PartAccess | PartCopy,
    *,
    view: ViewId | None = None,
    config: PullConfig | None = None,
    abandoned: Callable[[], bool] | None = None,
    loading: frozenset[str] = frozenset(),
) -> PullReport:
    """Pulls one part of the state at a header, and verifies it by its hash; other parts stay as they are.

    Args:
        donors: Members that hold it, the oldest first.
        dial: Opens an authenticated bulk connection.
        header: The committed header.
        state: Access to the part at this member; its tensors have memory.
        view: The view that makes GENESIS's parts; None at any other header (`part_name`).
        config: Waits and sizes.
        abandoned: Function that says whether the pull has become pointless.
        loading: Donors that get the part themselves.

    Raises:
        StateError, DeadlineError: The pull has failed, for one of the reasons that `pull_state` has.
    """
    head = named_head(part_name(header, state.part, view))
    return pull_state(
        donors, dial, head=head, seq=header.seq, state=state, config=config, abandoned=abandoned, loading=loading
    )


def part_manifest(
    donors: Sequence[Endpoint],
    dial: Dial,
    header: Header,
    part: str,
    *,
    config: PullConfig | None = None,
    abandoned: Callable[[], bool] | None = None,
) -> Mapping[str, Any]:
    """Returns the manifest of a part at a header other than GENESIS, from the first donor that answers.

    Args:
        donors: Members that may hold the part.
        dial: Opens an authenticated bulk connection.
        header: The committed header.
        part: Name of the part.
        config: Times to wait.
        abandoned: Function that says whether the answer has become pointless.

    Raises:
        StateError, DeadlineError: No donor gives the manifest; says why.
    """
    head = named_head(part_name(header, part))
    with PullSession(donors, dial, what=f"manifest of {part}", head=head, seq=header.seq, config=config) as session:
        session.abandoned = abandoned
        for member, donor in session.donors.items():
            session.start("manifest", member, partial(donor.ask, Type.GET_MANIFEST, Type.MANIFEST))
        while session.pending("manifest"):
            for _, _, text in session.collect():
                found = decode_values(text, {})
                _check_part(found, part)
                return found
        raise session.exhausted(None)


def part_hashes(parts: Iterable[PartAccess]) -> dict[str, str]:
    """Returns the hash of each part's tensors, by the part's name; equal hashes mean equal tensors (protocol.md 24)."""
    return {state.part: state_hash(state.tensors()) for state in parts}


__all__ = [
    "PartAccess",
    "PartCopy",
    "PartServer",
    "PartState",
    "RestState",
    "part_hashes",
    "part_manifest",
    "part_name",
    "pull_part",
]
