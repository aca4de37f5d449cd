"""Warns of environment variables that look like settings but are not, such as the typing error `CHAOS_ENDPIONT`."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from functools import cache

from chaos_lightning.control.options import HOSTED
from chaos_lightning.declared import PREFIX, declared
from chaos_lightning.outer.cluster.cluster_options import ClusterOptions
from chaos_lightning.outer.rules.settings import OuterSettings
from chaos_lightning.pipeline.options import PipelineOptions
from chaos_lightning.settings import PROFILED, EngineConfig

_log = logging.getLogger("chaos_lightning")

OTHERS = frozenset(
    {
        "CHAOS_TOKEN",
        "CHAOS_NODE",  # from torchrun's agent to its workers, as the next two
        "CHAOS_SETTINGS",
        "CHAOS_AGENT",
        "CHAOS_PS",
        PROFILED,
        "CHAOS_LINK_RELAY",  # of emulated networks, fuzzers and demos, as all that follow
        "CHAOS_EMULATE",
        "CHAOS_HOST",
        "CHAOS_LAB",
        "CHAOS_DEMO",
        "CHAOS_FAR_SERVER",
        "CHAOS_FUZZ_MEMORY_MIB",
        "CHAOS_FUZZ_MINUTES",
        "CHAOS_REWRITE",
    }
)
"""Variables that are read and are no field of a class of settings."""
_OF_KUBERNETES = re.compile(
    r"CHAOS_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)"
)
"""Names that the kubelet gives each pod for a Service called chaos or chaos-...; CHAOS_PORT itself is a setting."""


def known() -> frozenset[str]:
    """Returns the names of all environment variables that some part of the package reads."""
    classes = (EngineConfig, ClusterOptions, OuterSettings, PipelineOptions)
    found = (*(declared(settings) for settings in classes), HOSTED)
    return OTHERS.union(made.variable for settings in found for made in settings.values())


@cache
def warn_of_unknown() -> None:
    """Logs a warning, once in a process, for each CHAOS_* environment variable that is not a setting."""
    for line in unknown(os.environ):
        _log.warning("%s", line)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Returns a warning for each CHAOS_* variable that is not a setting, with the name that was probably meant."""
    read, lines = known(), []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in read and not _OF_KUBERNETES.fullmatch(name):
            words = [other.removeprefix(PREFIX) for other in read]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), words, 1, 0.7)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else "see docs/settings.md for those that are"
            lines.append(f"environment variable {name} is no setting and changes nothing; {meant}")
    return lines
