"""Reads values of the setting `plan`: the name of a kind of plan, or a file with trees.

Theory of operation. `rotating`, `chain`, `tree` and `tree:K` are named, and so are planners (`auto`, the default, and
others, see planning/overlay.py), which draw trees from the links that were measured. Anything that begins with `file:`
or ends in .yaml, .yml or .json is the path of a file with the fields of `PlanSpec`:

    chunk_nbytes: 262144          # optional; 0: by the model's size
    trees:
      - {start: 0, stop: 4096, members: [a, b, c], parents: ["", a, a]}
      - {start: 4096, stop: 10000, members: [a, b, c], parents: [b, "", b]}

Member i's parent is parents[i], "" at the root; members are named by their names, or by their ids. The ranges are bytes
of the gradient buffer and cover each byte once, borders at multiples of 64; a single tree without start and stop takes
all of them. Trees with a `weight` in place of a range share the buffer by their weights. The file is read and checked
where a member is configured, so that a mistake is refused before anything begins. It is the scheduler that goes by it,
so only the machine that hosts it reads the file for the job, and what it read travels with its settings. If the members
change so that the trees do not fit, `planning.trees.plan_for` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError, PlanError
from chaos_lightning.planning.documents import read_file
from chaos_lightning.planning.trees import check_plan, expand
from chaos_lightning.protocol.types import PlanSpec, Span, TreeSpec

DEFAULT_PLAN = "auto"
EXPECTED = (
    "rotating, chain, tree, tree:K, a planner (auto, widest, packed, star, fapt, local, spread, MODULE:FUNCTION) "
    "or a file of trees (file:PATH, or a path ending in .yaml, .yml or .json)"
)
_PREFIX = "file:"
_SUFFIXES = (".yaml", ".yml", ".json")


def plan_path(text: str) -> Path | None:
    """Returns the path of the file that a plan setting names; None if it names none."""
    if text.startswith(_PREFIX):
        return Path(text[len(_PREFIX) :])
    return Path(text) if text.endswith(_SUFFIXES) else None


def absolute_plan(text: str) -> str:
    """Returns the plan setting with an absolute file path, for a process that may run in another directory."""
    path = plan_path(text)
    return text if path is None else f"{_PREFIX}{path.absolute()}"


def read_plan(text: str, chunk_nbytes: int = 0) -> PlanSpec:
    """Returns the plan that a user wrote, after the checks that are possible before members and gradient buffer are
    known.

    Args:
        text: See the module.
        chunk_nbytes: Size of a chunk; 0 leaves the file's, or the default.

    Raises:
        ConfigurationError: An unknown kind, a file that cannot be read, or a plan that can fit no job; names the file.
    """
    path = plan_path(text)
    if path is None:
        if text == "user":
            raise PlanError(f"plan 'user' has no trees; expected {EXPECTED}")
        spec = PlanSpec(text)
    else:
        spec = plan_from(_load(path), f"plan file {str(path)!r}")
    if chunk_nbytes:
        spec = replace(spec, chunk_nbytes=chunk_nbytes)
    try:
        check_plan(spec)
    except PlanError as error:
        where = f"plan file {str(path)!r}: {error}" if path is not None else f"{error}; expected {EXPECTED}"
        raise PlanError(where) from error
    return spec


def check_bytes(text: str, spec: PlanSpec, nbytes: int, sections: Sequence[Span]) -> None:
    """Refuses a user's trees if their byte ranges do not cover this model's gradients.

    Args:
        text: Text that the user wrote, for the message.
        spec: Plan as it was read from the text.
        nbytes: Length of the gradient buffer.
        sections: Optimizers' parts of the buffer.

    Raises:
        PlanError: The ranges do not; names the file, the tree and the bytes.
    """
    if spec.kind != "user":
        return
    try:
        expand(spec, spec.trees[0].members, nbytes, sections)
    except PlanError as error:
        raise PlanError(f"plan {text!r} does not fit this model: {error}") from error


def plan_from(given: object, what: str) -> PlanSpec:
    """Returns a plan from a file's mapping with the keys kind, chunk_nbytes and trees (of start, stop, members,
    parents).

    Raises:
        ConfigurationError: `what`, and what is wrong.
    """
    try:
        fields = _object(given, ("kind", "chunk_nbytes", "trees"))
        default = PlanSpec()
        trees = tuple(_tree(i, t) for i, t in enumerate(_list(fields.get("trees"), "trees")))
        explicit = "trees" if any(tree.weight for tree in trees) else "user"
        kind = str(fields.get("kind", explicit if trees else default.kind))
        if trees and kind not in ("user", "trees"):
            raise TypeError(f"kind {kind!r} has no trees of its own; leave trees out, or write kind: user")
        return PlanSpec(kind, int(fields.get("chunk_nbytes", default.chunk_nbytes)), trees)
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{what}: {error} in {str(given)[:500]}") from error


def _tree(index: int, given: object) -> TreeSpec:
    fields = _object(given, ("start", "stop", "members", "parents", "weight"), f"tree {index}: ")
    members, parents = (_list(fields[k], f"tree {index}: {k}") for k in ("members", "parents"))
    words = [str(p) if p is not None else "" for p in parents]
    start, stop, weight = int(fields.get("start", 0)), int(fields.get("stop", 0)), float(fields.get("weight", 0))
    return TreeSpec(start, stop, tuple(map(str, members)), tuple(words), weight)


def _object(given: object, known: Sequence[str], where: str = "") -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}expected an object with {', '.join(known)}")
    unknown = sorted(str(k) for k in given if k not in known)
    if unknown:
        raise TypeError(f"{where}unknown keys {unknown}; expected some of {list(known)}")
    return given


def _list(given: object, where: str) -> Sequence[object]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise TypeError(f"{where} is {given!r}, expected a list")
    return given


def _load(path: Path) -> object:
    name = f"plan file {str(path)!r}"
    try:
        return read_file(path, name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name} cannot be read: {error}") from error
