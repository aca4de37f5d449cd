"""Reads a topology from a YAML or JSON file; an error names the place of a mistake in the file.

    name: three boxes
    nodes: [edge-1, edge-2, {name: edge-3, access: 200 Mbps}]
    links:
      - {between: [edge-1, edge-2], rate: 300 Mbps, latency: 20 ms}
      - {between: [edge-2, edge-3], rate: 100 Mbps}
    schedule:
      - {at: 30 s, link: [edge-1, edge-2], rate: 10%}
      - {at: 60 s, link: [edge-2, edge-3], state: cut, for: 5 s}
      - {every: 3 min, rate: {from: 100 Mbps, to: 1000 Mbps}, seed: 1}

Theory of operation. A file becomes a tree of `Spot`s, values that know their place (planning/documents.py). Every
scalar is taken as the text that was written: YAML's own ideas about `no`, `10e3` or `1:30` do not matter, units are
always written out. What the topology as a whole forbids is found by the topology itself, and named here by its line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.documents import Spot, read_located
from chaos_lightning.planning.quantities import rate_bps, seconds
from chaos_lightning.testing.edge.topology import Change, Condition, EdgeNode, Link, Pair, SchemaError, Topology


def load_topology(source: str | Path) -> Topology:
    """Reads a topology from a file: JSON if its name ends in `.json`, otherwise YAML.

    Raises:
        ConfigurationError: The file cannot be read, or describes an impossible topology; the message names file, line,
            key, what was given and what is expected.
    """
    path = Path(source)
    try:
        spot, lines = read_located(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"topology file {str(path)!r} cannot be read: {error}") from error
    return _Reader(str(path), lines).topology(spot, path.stem)


# --- what spots mean ----------------------------------------------------------------------------------------------


class _Reader:
    """Turns parsed YAML or JSON, with the line of each key, into a topology."""

    def __init__(self, source: str, lines: Mapping[str, int]) -> None:
        self._source, self._lines = source, lines

    def topology(self, top: Spot, name: str) -> Topology:
        keys = self._mapping(top, "name", "nodes", "links", "schedule")
        nodes = [self._node(s) for s in self._list(top, keys, "nodes")]
        links = [self._link(s) for s in self._list(top, keys, "links", needed=len(nodes) > 1)]
        schedule = [self._change(s) for s in self._list(top, keys, "schedule", needed=False)]
        title = self._text(keys["name"]) if "name" in keys else name
        try:
            return Topology(tuple(nodes), tuple(links), tuple(schedule), title)
        except SchemaError as flaw:
            raise SchemaError(flaw.path, flaw.problem, self._where(flaw.path)) from None

    def _where(self, path: str) -> str:
        """Returns file and line of a key, or of the nearest enclosing key whose line is known."""
        while path and path not in self._lines:
            path = path.rpartition(".")[0]
        line = self._lines.get(path, 0)
        return f"{self._source}:{line}" if line else self._source

    def _fail(self, spot: Spot, problem: str) -> NoReturn:
        raise SchemaError(spot.path, problem, self._where(spot.path))

    # --- shapes

    def _mapping(self, spot: Spot, *known: str) -> dict[str, Spot]:
        if not isinstance(spot.value, dict):
            self._fail(spot, f"{_kind(spot)}; expected the keys {', '.join(known)}")
        for key, below in spot.value.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                self._fail(below, f"unknown key {key!r}{meant}; expected some of {', '.join(known)}")
        return spot.value

    def _list(self, above: Spot, keys: dict[str, Spot], key: str, *, needed: bool = True) -> Sequence[Spot]:
        spot = keys.get(key)
        if spot is None or spot.value == "":
            if needed:
                self._fail(above if spot is None else spot, f"{key!r} is missing or empty; expected a list")
            return ()
        if not isinstance(spot.value, list):
            self._fail(spot, f"{_kind(spot)}; expected a list")
        return spot.value

    def _text(self, spot: Spot) -> str:
        if not isinstance(spot.value, str) or not spot.value.strip():
            self._fail(spot, f"{_kind(spot)}; expected a text")
        return spot.value.strip()

    def _pair(self, spot: Spot) -> Pair:
        if not isinstance(spot.value, list) or len(spot.value) != 2:
            self._fail(spot, f"{_kind(spot)}; expected the two ends, such as [edge-1, edge-2]")
        return self._text(spot.value[0]), self._text(spot.value[1])

    def _value(self, spot: Spot, parse: Callable[[str], float]) -> float:
        try:
            return parse(self._text(spot))
        except ValueError as error:
            self._fail(spot, str(error))

    # --- entries

    def _node(self, spot: Spot) -> EdgeNode:
        if isinstance(spot.value, str):
            return EdgeNode(self._text(spot))
        keys = self._mapping(spot, "name", "access", "starts")
        if "name" not in keys:
            self._fail(spot, "a node without 'name'")
        return EdgeNode(
            self._text(keys["name"]),
            self._value(keys["access"], rate_bps) if "access" in keys else None,
            self._value(keys["starts"], seconds) if "starts" in keys else 0.0,
        )

    def _link(self, spot: Spot) -> Link:
        keys = self._mapping(spot, "between", "rate", "latency")
        for needed in ("between", "rate"):
            if needed not in keys:
                self._fail(spot, f"a link without {needed!r}; expected between: [NODE, NODE] and rate: 300 Mbps")
        latency = self._value(keys["latency"], seconds) if "latency" in keys else 0.0
        return Link(*self._pair(keys["between"]), self._value(keys["rate"], rate_bps), latency)

    def _change(self, spot: Spot) -> Change:
        keys = self._mapping(spot, "at", "every", "for", "link", "rate", "latency", "state", "seed")
        if "at" not in keys and "every" not in keys:
            self._fail(spot, "it never happens; expected at: 30 s or every: 3 min")
        rate, share = self._rate(keys["rate"]) if "rate" in keys else (None, None)
        values: dict[str, Any] = {
            f"{key}_s": self._value(keys[key], seconds) for key in ("at", "every", "for", "latency") if key in keys
        }
        for key in ("every", "for"):
            if values.get(f"{key}_s") == 0.0:
                self._fail(keys[key], "0: expected a positive duration, or no such key")
        return Change(
            **values,
            links=self._which(keys.get("link")),
            rate_bps=rate,
            share=share,
            condition=self._state(keys["state"]) if "state" in keys else None,
            seed=self._whole(keys["seed"]) if "seed" in keys else 0,
        )

    def _which(self, spot: Spot | None) -> tuple[Pair, ...]:
        if spot is None or spot.value == "all":
            return ()
        if isinstance(spot.value, list) and spot.value and isinstance(spot.value[0].value, list):
            return tuple(self._pair(pair) for pair in spot.value)
        return (self._pair(spot),)

    def _rate(self, spot: Spot) -> tuple[tuple[float, float] | None, float | None]:
        if isinstance(spot.value, dict):
            keys = self._mapping(spot, "from", "to")
            if len(keys) < 2:
                self._fail(spot, "a random rate needs both bounds, such as {from: 100 Mbps, to: 1000 Mbps}")
            return (self._value(keys["from"], rate_bps), self._value(keys["to"], rate_bps)), None
        text = self._text(spot)
        if text.endswith("%"):
            try:
                return None, float(text[:-1]) / 100
            except ValueError:
                self._fail(spot, f"{text!r}: expected a part of the link's own rate such as '10%'")
        rate = self._value(spot, rate_bps)
        return (rate, rate), None

    def _state(self, spot: Spot) -> Condition:
        text = self._text(spot)
        try:
            return Condition(text)
        except ValueError:
            self._fail(spot, f"{text!r}: expected one of {', '.join(Condition)}")

    def _whole(self, spot: Spot) -> int:
        text = self._text(spot)
        try:
            return int(text)
        except ValueError:
            self._fail(spot, f"{text!r}: expected a whole number")


def _kind(spot: Spot) -> str:
    if isinstance(spot.value, str):
        return repr(spot.value) if spot.value else "nothing"
    return "a list" if isinstance(spot.value, list) else "a mapping"
