"""Lightning accelerator for Ascend NPUs, as far as Lightning lacks one.

Theory of operation. `import torch` loads the vendor's `torch_npu` by itself where it is installed; from then on the
device is reached through `torch.accelerator`, which needs no vendor name in any call. This class therefore only tells
Lightning what it asks an accelerator, and explains what is missing on a machine without an NPU. It is used by
`accelerator=npu`, or directly: `Trainer(accelerator=NPUAccelerator(), devices=[0], strategy="chaos")`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from chaos_lightning.errors import UnsupportedError

DEVICE_TYPE = "npu"


class NPUAccelerator(Accelerator):
    """Ascend NPUs through `torch.accelerator`.

    Raises:
        UnsupportedError: This machine has none, or torch does not see it. Lightning's own words for that would only be
            that it "can not run on your system".
    """

    def __init__(self) -> None:
        super().__init__()
        if self.is_available():
            return
        if find_spec("torch_npu") is None:
            cause = "the package torch_npu is not installed; install the release that belongs to this torch"
        else:
            cause = "torch_npu is installed but finds no device; see whether `npu-smi info` lists one"
        raise UnsupportedError(f"no NPU for torch {torch.__version__}: {cause}, or choose accelerator=gpu or edge_cpu")

    @staticmethod
    def is_available() -> bool:
        """Whether torch's accelerator on this machine is an NPU."""
        current = torch.accelerator.current_accelerator(check_available=True)
        return current is not None and current.type == DEVICE_TYPE

    def setup_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""
        if device.type != DEVICE_TYPE:
            raise ValueError(f"expected an {DEVICE_TYPE} device, got {device}")
        torch.accelerator.set_device_index(device.index or 0)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Bytes of device memory in use, by torch's allocator."""
        index = torch.device(device).index or 0
        return {
            "memory_allocated_bytes": torch.accelerator.memory_allocated(index),
            "max_memory_allocated_bytes": torch.accelerator.max_memory_allocated(index),
        }

    def teardown(self) -> None:
        """Give cached device memory back."""
        if self.is_available():
            torch.accelerator.empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Device numbers from what the user wrote: a count, -1 for all, "0,2" or a list of numbers."""
        count = NPUAccelerator.auto_device_count()
        if isinstance(devices, str):
            devices = [int(part) for part in devices.split(",")] if "," in devices else int(devices)
        if isinstance(devices, int):
            devices = list(range(count if devices == -1 else devices))
        if not devices or any(not 0 <= index < count for index in devices):
            raise ValueError(f"devices {devices} asked for, but this machine has {count} NPUs (numbered from 0)")
        return list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(DEVICE_TYPE, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count() if NPUAccelerator.is_available() else 0

    @staticmethod
    def name() -> str:
        return DEVICE_TYPE
