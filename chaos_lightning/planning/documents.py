"""Reads YAML and JSON files written by people; refuses repeated keys, and anchors that expand to too many values.

Theory of operation. YAML becomes nodes first (`yaml.compose`). Anchors make a graph of them, in which 800 bytes can
stand for billions of values, or for a list that contains itself. So the values are counted before any is made, each
node once. Then the safe constructor makes them, or `read_located` keeps the text of each with its place in the file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError

MOST_VALUES = 1_000_000
"""Number of values a text may stand for, with each anchor counted wherever it is used."""
_MAX_DEPTH = 8
"""Depth of a file that is read with its places."""
_EXPONENT = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+")


@dataclass(frozen=True, slots=True)
class Spot:
    """Value in a file, with its path of keys, such as `links[2].rate`."""

    value: str | list[Spot] | dict[str, Spot]
    path: str


def read_file(path: Path, source: str = "") -> Any:
    """Returns the content of a file, read as JSON if its name ends in `.json`, else as YAML.

    Args:
        path: The file.
        source: Name of the file, for errors; by default its path.

    Raises:
        OSError, UnicodeDecodeError: The file cannot be read.
        ConfigurationError: See `read_json` and `read_yaml`.
    """
    text = path.read_text(encoding="utf-8")
    return (read_json if path.suffix == ".json" else read_yaml)(text, source or str(path))


def read_located(path: Path) -> tuple[Spot, dict[str, int]]:
    """Returns the content of a file with each scalar as it was written, and, for YAML, the line number of each path of
    keys.

    Raises:
        OSError, UnicodeDecodeError: The file cannot be read.
        ConfigurationError: See `read_file`; or it is nested too deep.
    """
    text, source, lines = path.read_text(encoding="utf-8"), str(path), dict[str, int]()

    def spot(value: Any, place: str, depth: int) -> Spot:
        where = source
        if (mark := getattr(value, "start_mark", None)) is not None:
            lines[place] = mark.line + 1
            where = f"{source}:{lines[place]}"
            if value.id == "mapping":
                value = {key.value: below for key, below in value.value}
            else:
                value = None if value.id == "scalar" and value.tag.endswith(":null") else value.value
        if depth > _MAX_DEPTH:
            raise ConfigurationError(f"{where}: {place}: nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict):
            return Spot({k: spot(v, f"{place}.{k}" if place else k, depth + 1) for k, v in value.items()}, place)
        if isinstance(value, list):
            return Spot([spot(v, f"{place}[{i}]", depth + 1) for i, v in enumerate(value)], place)
        return Spot("" if value is None else str(value), place)

    if path.suffix == ".json":
        return spot(read_json(text, source), "", 0), lines
    root = compose_yaml(text, source)
    return spot({} if root is None else root, "", 0), lines


def read_json(text: str, source: str) -> Any:
    """Returns the values of a JSON text, as `json.loads` does; refuses repeated keys.

    Args:
        text: The file's text.
        source: Name of the file, for errors.

    Raises:
        ConfigurationError: The text is no JSON, has a key twice in one object, or has a number of too many digits.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigurationError(f"{source}: the key {key!r} is there twice in one mapping; expected it once")
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{source}:{error.lineno}: no JSON: {error.msg}") from None
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{source}: a value cannot be read: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{source}: nested too deep") from None


def read_yaml(text: str, source: str) -> Any:
    """Returns the mappings, lists and scalars of a YAML text as `yaml.safe_load` does; 1e9 is a number, as in YAML 1.2.

    Args:
        text: The file's text.
        source: Name of the file, for errors.

    Raises:
        ConfigurationError: The text is no YAML, has a key twice in one mapping, or stands for more than MOST_VALUES
            values; names the line.
    """
    import yaml

    root = compose_yaml(text, source)
    if root is None:
        return None
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigurationError(_no_yaml(error, source)) from None
    except ValueError as error:  # an integer of more digits than Python converts, a date that does not exist
        raise ConfigurationError(f"{source}: a value cannot be read: {error}") from None
    finally:
        loader.dispose()


def compose_yaml(text: str, source: str) -> Any:
    """Returns the root node of a YAML text, with lines, or None for an empty text; refuses what `read_yaml` refuses."""
    import yaml

    class _Yaml12(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """YAML loader that reads 1e9 as a number, as YAML 1.2 does; in YAML 1.1 it is a text."""

    _Yaml12.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-.0123456789"))
    try:
        root = yaml.compose(text, _Yaml12)
        _count(root, source, {})
    except yaml.YAMLError as error:
        raise ConfigurationError(_no_yaml(error, source)) from None
    except RecursionError:
        raise ConfigurationError(f"{source}: nested too deep") from None
    return root


def _count(node: Any, source: str, known: dict[int, int]) -> int:
    """Returns the number of values that a YAML node expands to, anchors included; refuses an anchor that contains
    itself.
    """
    if node is None or isinstance(node.value, str):
        return 1
    found = known.get(id(node))
    line = node.start_mark.line + 1
    if found == 0:
        raise ConfigurationError(f"{source}:{line}: an anchor that contains itself; expected a tree of values")
    if found is None:
        known[id(node)] = 0
        found = 1
        seen: dict[str, int] = {}
        for child in node.value:
            if isinstance(child, tuple):
                _demand_once(child[0], seen, source)
                found += _count(child[0], source, known)
                child = child[1]
            found += _count(child, source, known)
        if found > MOST_VALUES:
            raise ConfigurationError(
                f"{source}:{line}: anchors make this more than {MOST_VALUES:,} values; write out what is needed"
            )
        known[id(node)] = found
    return found


def _demand_once(key: Any, seen: dict[str, int], source: str) -> None:
    """Notes the line of a mapping's key; raises ConfigurationError if the mapping has this key already."""
    line, name = key.start_mark.line + 1, key.value
    if not isinstance(name, str):
        raise ConfigurationError(f"{source}:{line}: a key is a list or mapping; expected plain text")
    if name in seen:
        raise ConfigurationError(
            f"{source}:{line}: the key {name!r} is there twice in one mapping (before in line {seen[name]}); "
            "expected it once"
        )
    seen[name] = line


def _no_yaml(error: Exception, source: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f":{mark.line + 1}" if mark is not None else ""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{source}{where}: no YAML: {problem}"
