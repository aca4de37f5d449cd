"""How many lines there are, room by room: code, docstrings with comments, blank; as markdown.

    python .ci/size.py [--before COMMIT]

Counted are Python files but for what protoc generates: of the working tree, and of an older commit beside it. Folders
that have moved since are counted where they are now (MOVED); what was divided among several keeps a row of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("strategies", "callbacks", "configs")
"""Rooms of the package that are folders at the root."""
MOVED = {"simulate": "lab", "testing": "lab", "demo": "lab", "fuzz": "lab"}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True)
class Size:
    """Lines of some files. A line with code counts as code, whatever else stands on it."""

    code: int = 0
    words: int = 0
    """Docstrings and comments."""
    blank: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.code + other.code, self.words + other.words, self.blank + other.blank)

    @property
    def lines(self) -> int:
        return self.code + self.words + self.blank


def size_of(source: str) -> Size:
    """Of one file; a string that stands for itself is a docstring, also below an attribute."""
    lines = source.splitlines()
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            words.add(token.start[0])
    blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in words)
    return Size(len(lines) - len(words) - blank, len(words), blank)


def room_of(path: str) -> tuple[str, str] | None:
    """(part, room) of a file; None: it is not counted."""
    first, *rest = PurePosixPath(path).parts
    if not path.endswith(".py") or path.endswith(GENERATED):
        return None
    if first in ("tests", "benchmarks", "lab"):
        return first, first
    if first in LINKED:
        return "product", first
    if first != "chaos_lightning":
        return None
    room = MOVED.get(rest[0], rest[0]) if len(rest) > 1 else "(root)"
    return ("lab" if room == "lab" else "product"), room


def sizes(files: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Size]:
    """By part and room, from (path, source) of each file."""
    found: dict[tuple[str, str], Size] = {}
    for path, source in files:
        if (place := room_of(path)) is not None:
            found[place] = found.get(place, Size()) + size_of(source)
    return found


def working_tree() -> Iterable[tuple[str, str]]:
    """Files that git tracks or would."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for path in listed.stdout.splitlines():
        if (ROOT / path).is_file():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def commit(name: str) -> Iterable[tuple[str, str]]:
    """Files of a commit."""
    packed = subprocess.run(["git", "archive", "--format=tar", name], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".py"):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read().decode()


def table(now: Mapping[tuple[str, str], Size], before: Mapping[tuple[str, str], Size] | None = None) -> list[str]:
    """Markdown: a row for each room, and for each part of several rooms, largest room first."""
    heads = ["room", "code", "docstrings, comments", "blank", "lines"] + (
        [] if before is None else ["before", "change"]
    )
    rows = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]

    def row(title: str, keys: list[tuple[str, str]], mark: str = "") -> None:
        here = sum((now.get(k, Size()) for k in keys), Size())
        cells = [here.code, here.words, here.blank, here.lines]
        if before is not None:
            there = sum((before.get(k, Size()) for k in keys), Size())
            cells += [there.lines, here.lines - there.lines]
        told = [f"{mark}{n:+,}{mark}" if i == 5 else f"{mark}{n:,}{mark}" for i, n in enumerate(cells)]
        rows.append(f"| {mark}{title}{mark} | " + " | ".join(told) + " |")

    places = {*now, *(before or {})}
    for key in sorted((p for p in places if p[0] == "product"), key=lambda p: (-now.get(p, Size()).lines, p)):
        row(key[1], [key])
    row("product", [p for p in places if p[0] == "product"], "**")
    for part in ("lab", "tests", "benchmarks"):
        row(part, [(part, part)], "**" if part == "lab" else "")
    row("tests and benchmarks", [("tests", "tests"), ("benchmarks", "benchmarks")], "**")
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", default="", metavar="COMMIT", help="compare with this commit")
    args = p.parse_args()
    before = sizes(commit(args.before)) if args.before else None
    print("\n".join(table(sizes(working_tree()), before)))


if __name__ == "__main__":
    main()
