"""Declares the settings of strategy `chaos_pipeline` that `chaos` does not have, once each (declared.py).

Nothing here imports torch or Lightning, so Hydra's types and docs/settings.md can be made of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chaos_lightning.declared import at_least, check_each, declared, document, one_of, setting
from chaos_lightning.planning.pipelines.request import ON_LOST_PARTS, PIPELINE_POLICIES
from chaos_lightning.planning.quantities import size_nbytes
from chaos_lightning.settings import absolute_path, from_environment


def _size(text: str) -> str:
    """Returns an error text if a text is no valid size in bytes; "" if it is one."""
    try:
        return "" if not text or int(text if text.isdigit() else size_nbytes(text)) > 0 else "expected bytes above 0"
    except ValueError as error:
        return str(error)


def _file(text: str) -> str:
    return "" if not text or Path(text).is_file() else "no such file; expected one that `chaos-lightning profile` wrote"


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Settings of pipelines. `policy`, `copies` and the like must be equal at all members."""

    micro_batches: int = setting(
        4,
        "Number of micro-batches in an optimizer step. Each has the training loader's batch size; one batch of the "
        "loop is one step.",
        check=at_least(1, "a whole number of at least 1"),
    )
    policy: str = setting(
        "adaptive",
        "How the job goes on after a loss: adaptive, reroute, dynamic or restart. reroute sends micro-batches through "
        "others that hold the same layers; dynamic moves layers to the best plan for those who are left; adaptive "
        "takes whichever of the two trains more samples until the next loss; restart ends the job with exit code 79, "
        "and it begins again from a checkpoint.",
        check=one_of(PIPELINE_POLICIES),
    )
    device_memory: str = setting(
        "",
        "Memory for layers on this member's device, as bytes or a text such as 8 GiB. By default what the device has; "
        "on a CPU what the machine has free, shared by this job's processes here.",
        check=_size,
    )
    chain: str = setting(
        "",
        "Name of the list of blocks that stages are cut from, such as model.layers. By default the module's attribute "
        "chaos_chain, else the one list that can be meant.",
    )
    profile: str = setting(
        "",
        "File of `chaos-lightning profile`, whose times and sizes of layers count. By default layers are measured at "
        "the start, with one micro-batch.",
        check=_file,
        absolute=absolute_path,
        metavar="PATH",
    )
    copies: int = setting(
        2,
        "Number of members that hold each layer, as far as memory allows. With one, any loss loses layers.",
        check=at_least(1, "a whole number of at least 1"),
    )
    on_lost_parts: str = setting(
        "wait",
        "What the job does when nobody is left who holds some layer: wait for a machine that comes back, or end (exit "
        "code 79).",
        check=one_of(ON_LOST_PARTS),
    )
    dry_run: bool = setting(
        False,
        "Say what the planner makes of this model, and end before anything is trained. The members of a running job "
        "are asked for; without one, min_nodes devices like this one are assumed.",
    )

    def __post_init__(self) -> None:
        check_each(self)

    @property
    def given_memory(self) -> int | str | None:
        """Device memory as given by the user, in bytes or as text such as "8 GiB"; None if not given."""
        return (int(self.device_memory) if self.device_memory.isdigit() else self.device_memory) or None

    @classmethod
    def build(cls, given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> PipelineOptions:
        """Returns the settings; arguments that are not None override the environment, which overrides the defaults.

        Raises:
            ConfigurationError: A setting cannot have this value; names it and what is expected.
        """
        rows = declared(cls)
        told = {name: rows[name].read(value, name) for name, value in given.items() if value is not None}
        return cls(**(from_environment(rows, environ) | told))


document(PipelineOptions)
