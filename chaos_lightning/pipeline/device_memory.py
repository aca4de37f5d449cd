"""Determines the memory of a member's device: as the user gives it, else as the accelerator or machine reports it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.units import amount
from chaos_lightning.planning.quantities import size_nbytes
from chaos_lightning.replication.snapshot import available_nbytes


class DeviceMemory(NamedTuple):
    """Memory that one member may use on its device, and where the figure comes from.

    Attributes:
        nbytes: Size of the memory, in bytes.
        words: A line for the console: how much, and where the figure comes from.
    """

    nbytes: int
    words: str


def device_memory(given: int | str | None, device: torch.device, processes_here: int = 1) -> DeviceMemory:
    """Returns the memory that a member may use on its device, and where the figure comes from.

    Args:
        given: Bytes, or a text such as "8 GiB"; None: see `default_device_memory`.
        device: Device of the layers.
        processes_here: Number of this job's processes on this machine.

    Raises:
        ConfigurationError: `given` is no size, or the device does not tell its memory.
    """
    if given is None:
        nbytes = default_device_memory(device, processes_here)
        of = f"{device} has" if device.type != "cpu" else "of what this machine and its control groups have free"
        shared = "" if processes_here < 2 else f", shared by {processes_here} processes of this job here"
        return DeviceMemory(nbytes, f"memory for layers: {amount(nbytes)} {of}{shared}; device_memory=... sets it")
    try:
        nbytes = size_nbytes(given) if isinstance(given, str) else int(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(f"device_memory={given!r}: {error}") from None
    if nbytes <= 0 or isinstance(given, bool):
        raise ConfigurationError(f"device_memory={given!r}; expected bytes above 0, or a text such as '8 GiB'")
    return DeviceMemory(nbytes, f"memory for layers: {amount(nbytes)}, as device_memory={given!r} says")


def default_device_memory(device: torch.device, processes_here: int = 1) -> int:
    """Returns the bytes of an accelerator's memory; for a CPU, this process's share of the machine's available memory.

    Args:
        device: Device of the layers.
        processes_here: Number of this job's processes on this machine.

    Raises:
        ConfigurationError: The accelerator does not tell its memory.
    """
    if device.type == "cpu":
        return available_nbytes() // max(1, processes_here)
    try:
        total = torch.accelerator.get_memory_info(device)[1]
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise ConfigurationError(
            f"{device} does not tell its memory ({error}); give it as device_memory='8 GiB' or the like"
        ) from error
    return total // max(1, -(-processes_here // torch.accelerator.device_count()))
