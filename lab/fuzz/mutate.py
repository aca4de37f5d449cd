"""Makes hostile inputs: valid ones with a few changes, since random bytes already fail a reader's first check.

Theory of operation. Each function takes something valid and a source of randomness, and returns something that is
nearly valid. The randomness is Python's `Random` interface, so that hypothesis can stand behind it (it then knows which
choices led to a failure, and shrinks them) as well as a seed that atheris gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 3, 127, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, -(1 << 63))
TEXTS = ("", "a", "a~1", "b~2", "h~3", "~", "a~", "\0", "x" * 300, "..", "/", "a,b", "%s{0}", "\u202e", "\u20ac", "-1")
LONG = ("\u20ac" * 22, "x" * 5000, "\u00e9" * 70_000)
"""Texts beyond limits of protocol/limits.py, some of them only in bytes."""
IDS = ("a~1", "b~2", "h~3", "c~4")
MAX_ITEMS = 64
"""Largest number of parts of an input."""


# ------------------------------------------------------------------ bytes and parts


def bytes_of(data: bytes, rng: Random) -> bytes:
    """Returns the bytes with a few of them flipped, inserted, removed or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, max(0, len(changed) - 1))
        what = rng.randint(0, 4)
        if what == 0 and changed:
            changed[at] ^= 1 << rng.randint(0, 7)
        elif what == 1:
            changed[at:at] = bytes(rng.choice((0, 1, 127, 128, 255)) for _ in range(rng.randint(1, 8)))
        elif what == 2:
            del changed[at : at + rng.randint(1, 16)]
        elif what == 3:
            changed[at:at] = changed[at : at + rng.randint(1, 64)] * rng.randint(1, 4)
        elif changed:
            changed[at] = rng.choice((0, 1, 34, 91, 123, 127, 128, 255))
    return bytes(changed)


def joined(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """Returns an input made of numbered parts; the target decides what a part's number means."""
    return b"".join(bytes([tag & 255]) + len(part).to_bytes(3, "little") + part for tag, part in parts)


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Returns an input's parts as (number, bytes), the inverse of `joined`; any bytes can be split."""
    parts: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data) and len(parts) < MAX_ITEMS:
        length = int.from_bytes(data[at + 1 : at + 4], "little")
        parts.append((data[at], data[at + 4 : at + 4 + length]))
        at += 4 + length
    return parts


def parts_of(data: bytes, rng: Random, change: Callable[[int, bytes, Random], bytes], tags: Sequence[int]) -> bytes:
    """Returns an input with a few parts changed, removed, repeated, moved or renumbered."""
    parts = split(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, max(0, len(parts) - 1))
        what = rng.randint(0, 7)
        if not parts:
            parts.append((rng.choice(tags), b""))
        if what == 0:
            del parts[at]
        elif what == 1:
            parts.insert(rng.randint(0, len(parts)), parts[at])
        elif what == 2:
            parts[at] = (rng.choice(tags), parts[at][1])
        elif what == 3:
            parts.insert(at, (rng.choice(tags), change(rng.choice(tags), b"", rng)))
        else:
            parts[at] = (parts[at][0], change(parts[at][0], parts[at][1], rng))
    return joined(parts)


# ------------------------------------------------------------------ text


def text_of(text: str, rng: Random, alphabet: str) -> str:
    """Returns a text with characters or odd words inserted, removed or repeated."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(text))
        what = rng.randint(0, 3)
        if what == 0:
            text = text[:at] + rng.choice(alphabet) * rng.choice((1, 1, 1, 2, 300)) + text[at:]
        elif what == 1:
            text = text[:at] + text[at + rng.randint(1, 4) :]
        elif what == 2:
            text = text[:at] + rng.choice((*TEXTS, "9" * 30, "[", "]", "::1", "\ud800", "nan", "1e400")) + text[at:]
        else:
            text = text + text[at:]
    return text[:5000]


# ------------------------------------------------------------------ JSON


def json_of(data: bytes, rng: Random) -> bytes:
    """Returns a JSON document with some value replaced, repeated or removed."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_of(data, rng)
    if rng.randint(0, 9) == 0:
        return bytes_of(data, rng)
    if rng.randint(0, 40) == 0:
        return rng.choice((b"[", b'{"v":')) * rng.choice((500, 900, 4000))
    for _ in range(rng.randint(1, 3)):
        tree = _json_changed(tree, rng)
    try:
        return json.dumps(tree).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def _json_changed(tree: Any, rng: Random) -> Any:
    if isinstance(tree, dict) and tree and rng.randint(0, 4):
        key = rng.choice(sorted(tree))
        what = rng.randint(0, 5)
        if what == 0:
            return {k: v for k, v in tree.items() if k != key}
        if what == 1:
            return {**tree, rng.choice(("$", "v", "x", "", key + key)): tree[key]}
        return {**tree, key: _json_changed(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.randint(0, 4):
        at = rng.randint(0, len(tree) - 1)
        what = rng.randint(0, 4)
        if what == 0:
            return tree[:at] + tree[at + 1 :]
        if what == 1:
            return tree[: at + 1] + tree[at:]
        return [*tree[:at], _json_changed(tree[at], rng), *tree[at + 1 :]]
    deep: Any = 0
    if rng.randint(0, 20) == 0:
        for _ in range(rng.choice((50, 150, 600))):
            deep = [deep] if rng.randint(0, 1) else {"v": deep, "$": "list"}
        return deep
    return rng.choice(
        (None, True, False, "", "x", "\ud800", "\u20ac", "a~1", 0, -1, 1 << 40, 10**30, 1.5, 1e308, [], {}, [tree])
    )


# ------------------------------------------------------------------ protobuf messages


def proto_of(message: Any, rng: Random, depth: int = 0) -> None:
    """Changes one field of a protobuf message in place, or of a message nested in it."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    there = [f for f, _ in message.ListFields()]
    field = rng.choice(there) if there and rng.randint(0, 3) else rng.choice(fields)
    value = getattr(message, field.name)
    if field.is_repeated:
        _repeated(message, field, value, rng, depth)
    elif field.message_type is not None:
        what = rng.randint(0, 7)
        if what == 0:
            message.ClearField(field.name)
        else:
            value.SetInParent()
            proto_of(value, rng, depth + 1)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _repeated(message: Any, field: Any, value: Any, rng: Random, depth: int) -> None:
    what = rng.randint(0, 4)
    if what == 0 and len(value):
        del value[rng.randint(0, len(value) - 1)]
    elif what == 1 and len(value):
        copies = [value[rng.randint(0, len(value) - 1)] for _ in range(rng.choice((1, 2, 40)))]
        if len(value) < 2000:
            value.extend(copies)
    elif field.message_type is None:
        value.append(_scalar(field, rng))
    else:
        element = value[rng.randint(0, len(value) - 1)] if len(value) and what != 2 else value.add()
        proto_of(element, rng, depth + 1)


def _scalar(field: Any, rng: Random) -> Any:
    if field.enum_type is not None:
        return rng.choice((0, 1, 2, 3, 4, 5, 6, 99, (1 << 31) - 1))
    if field.type == field.TYPE_STRING:
        return rng.choice((*TEXTS, *IDS, *LONG))
    if field.type == field.TYPE_BYTES:
        return bytes(rng.randint(0, 255) for _ in range(rng.choice((0, 1, 8, 300))))
    if field.type == field.TYPE_BOOL:
        return bool(rng.randint(0, 1))
    if field.type == field.TYPE_DOUBLE:
        return rng.choice((0.0, -1.0, 1e308, float("inf"), float("nan"), 5e-324))
    return rng.choice(NUMBERS)
