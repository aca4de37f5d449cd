"""Reads a `TrainingJob` from a YAML or JSON file, with one line for each error in it; and writes such files.

    micro_batches: 32
    layers:
      - {name: embedding, forward_s: 1 ms, backward_s: 2 ms, parameter_nbytes: 260 MB, output_nbytes: 16 MiB}
      - {name: block, repeat: 32, forward_s: 7.2 ms, backward_s: 15 ms, parameter_nbytes: 405 MB}
    devices:
      - {name: d, count: 16, per_host: 8, memory_nbytes: 80 GiB}
    between_hosts: {rate_bps: 200 Gbps, latency_s: 10 us}

Theory of operation. A file is a tree. Its quantities become numbers first: a field whose name ends in a unit (`_s`,
`_nbytes`, `_bps`) may be a text with a unit, or a number in the field's own. Then pydantic reads the tree as JSON, in
its strict mode, into the dataclasses of `job` and those here that stand for several layers or devices at once. Checks
are those of the dataclasses themselves. What pydantic finds is told in words, by its place in the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from chaos_lightning.errors import ConfigurationError
from chaos_lightning.planning.documents import read_file
from chaos_lightning.planning.pipelines.decoder import Decoder, read_model
from chaos_lightning.planning.pipelines.job import (
    CLOSED,
    MOST_DEVICES,
    MOST_LAYERS,
    MOST_MICRO_BATCHES,
    Device,
    JobError,
    Layer,
    LinkRate,
    MemoryRules,
    NamedLink,
    Overheads,
    TrainingJob,
    check_number,
)
from chaos_lightning.planning.quantities import rate_bps, seconds, size_nbytes

MOST_ERRORS = 8
_MAX_DEPTH = 8
_UNITS: dict[str, tuple[Callable[[str], float], str]] = {
    "_s": (seconds, "seconds, as a number or as in '2.5 ms'"),
    "_nbytes": (size_nbytes, "bytes, as a whole number or as in '80 GiB'"),
    "_bps": (rate_bps, "bits per second, as a number or as in '100 Gbps'"),
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text; write it in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dataclass_type": "a mapping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """Entry of a file for a layer, or for several equal ones, which are named NAME.0, NAME.1, ..."""

    __pydantic_config__ = CLOSED

    layer: Layer
    repeat: int = 1

    def __post_init__(self) -> None:
        check_number("repeat", self.repeat, least=1)

    def made(self) -> Iterator[Layer]:
        if self.repeat == 1:
            yield self.layer
        else:
            yield from (replace(self.layer, name=f"{self.layer.name}.{i}") for i in range(self.repeat))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """Entry of a file for a device, or for several equal ones, which are named NAME0, NAME1, ... (NAME-0, ... if NAME
    ends in a digit).
    """

    __pydantic_config__ = CLOSED

    device: Device
    count: int | None = None
    """Number of cards if `tensor_parallel` is given; else number of devices."""
    per_host: int = 0
    """Number of these on one host, one after the other; hosts are called host0, host1, ... through the file."""
    hosts: tuple[str, ...] = ()
    """Hosts over which these are spread, in order."""

    def __post_init__(self) -> None:
        check_number("count", 1 if self.count is None else self.count, least=1)
        check_number("per_host", self.per_host, least=0)
        if sum(map(bool, (self.device.host, self.per_host, self.hosts))) > 1:
            raise JobError("host, per_host and hosts say the same; expected one of them")

    def made(self, count: int, tensor_parallel: int, first_host: int) -> Iterator[Device]:
        """Yields the devices of this entry.

        Args:
            count: Number of cards.
            tensor_parallel: Cards of one device.
            first_host: Number of the next host that has no name.
        """
        one, t = self.device, tensor_parallel
        if count % t or self.per_host % t:
            raise JobError(
                f"devices: {one.name!r}: count is {count}, per_host is {self.per_host}; "
                f"expected multiples of tensor_parallel ({t})"
            )
        one = replace(one, memory_nbytes=one.memory_nbytes * t, cards=one.cards * t)
        between = "-" if one.name[-1:].isdigit() else ""  # a100 and 0 are not a1000
        for i in range(count // t):
            host = one.host
            if self.per_host:
                host = f"host{first_host + i * t // self.per_host}"
            elif self.hosts:
                host = self.hosts[i * len(self.hosts) * t // count]
            yield replace(one, name=one.name if self.count is None else f"{one.name}{between}{i}", host=host)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Content of a job's file."""

    __pydantic_config__ = CLOSED

    micro_batches: int
    """Micro-batches of one optimizer step, over all pipelines."""
    layers: tuple[LayerEntry, ...] = ()
    decoder: Decoder | None = None
    """Decoder model by formula, instead of layers."""
    devices: tuple[DeviceEntry, ...]
    tensor_parallel: int = 1
    """Cards of one device. Then `count`, `per_host`, `memory_nbytes` of devices are of cards; times are a device's."""
    samples: int | None = None
    """Samples in one micro-batch; by default the decoder's, else 1."""
    tied_nbytes: int = 0
    """Bytes of the gradients that the first and the last layer share; a decoder says so by `tied`."""
    within_host: LinkRate = field(default_factory=LinkRate)
    between_hosts: LinkRate = field(default_factory=LinkRate)
    links: tuple[NamedLink, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)
    memory: MemoryRules = field(default_factory=MemoryRules)

    def __post_init__(self) -> None:
        check_number("micro_batches", self.micro_batches, least=1, most=MOST_MICRO_BATCHES)
        check_number("tensor_parallel", self.tensor_parallel, least=1)
        if bool(self.layers) == (self.decoder is not None):
            given = "both are given" if self.layers else "neither has any"
            raise JobError(f"layers and decoder: {given}; expected at least one layer in one of them")
        if self.decoder is not None and self.tied_nbytes:
            raise JobError(f"tied_nbytes is {self.tied_nbytes} beside a decoder; expected decoder.tied: true")
        if self.decoder is not None and self.decoder.cards != 1:
            raise JobError(f"decoder.cards is {self.decoder.cards}; expected tensor_parallel at the top of the file")
        if sum(entry.repeat for entry in self.layers) > MOST_LAYERS:
            raise JobError(f"layers are more than {MOST_LAYERS}; expected a smaller repeat")
        if sum(entry.count or 1 for entry in self.devices) > MOST_DEVICES * self.tensor_parallel:
            raise JobError(f"devices are more than {MOST_DEVICES}; expected a smaller count")
        seen: set[str] = set()
        for entry in self.layers:
            if entry.layer.name in seen:
                raise JobError(f"layers: the name {entry.layer.name!r} is given twice; expected each to have its own")
            seen.add(entry.layer.name)

    def job(self, devices: int | None = None) -> TrainingJob:
        """Returns the job that the file describes.

        Args:
            devices: Number of devices instead of those in the file: the first ones, or more of the last kind.

        Raises:
            JobError: The file describes no possible job.
        """
        if self.decoder is not None:
            layers = replace(self.decoder, cards=self.tensor_parallel).made()
        else:
            layers = tuple(layer for entry in self.layers for layer in entry.made())
        per_micro_batch = 1 if self.decoder is None else self.decoder.micro_batch
        return TrainingJob(
            layers=layers,
            devices=tuple(self._devices(devices)),
            micro_batches=self.micro_batches,
            within_host=self.within_host,
            between_hosts=self.between_hosts,
            links=self.links,
            samples=per_micro_batch if self.samples is None else self.samples,
            overheads=self.overheads,
            memory=self.memory,
            tied_nbytes=self.tied_nbytes if self.decoder is None else self.decoder.tied_nbytes,
            work=None if self.decoder is None else replace(self.decoder, cards=self.tensor_parallel).work,
        )

    def _devices(self, wanted: int | None) -> list[Device]:
        t, found, hosts = self.tensor_parallel, list[Device](), 0
        counts = [t if entry.count is None else entry.count for entry in self.devices]
        if wanted is not None:
            check_number("--devices", wanted, least=1, most=MOST_DEVICES)
            more = wanted * t - sum(counts)
            if more > 0 and self.devices:
                last = self.devices[-1]
                if last.count is None or last.hosts:
                    raise JobError(
                        f"--devices is {wanted}; expected at most {sum(counts) // t}, or a last entry of devices that "
                        "has a count and per_host"
                    )
                counts[-1] += more
        for entry, count in zip(self.devices, counts, strict=True):
            found += entry.made(count, t, hosts)
            hosts += -(-count // entry.per_host) if entry.per_host else 0
        return found[:wanted]


# ------------------------------------------------------------------------------------------------ reading

CARD = Device(name="d", memory_nbytes=80 << 30)
"""Device for which a model by formula is planned: eight on a host, four micro-batches each, with these links."""
CARDS_PER_HOST, CARDS, WITHIN, BETWEEN = (
    8,
    8,
    LinkRate(rate_bps=2.4e12, latency_s=5e-6),
    LinkRate(rate_bps=4e11, latency_s=1e-5),
)


def find_job(model: str, devices: int | None = None) -> TrainingJob:
    """Returns the job in a file, or the job of a text "gpt:LAYERS,WIDTH" on equal cards.

    Args:
        model: Path of a file, or a formula.
        devices: Number of devices instead of those in the file, or of eight.

    Raises:
        JobError: The job cannot be.
    """
    if not model.startswith("gpt:"):
        return read_job(model, devices)
    count = CARDS if devices is None else devices
    check_number("--devices", count, least=1, most=MOST_DEVICES)
    cards = DeviceEntry(device=CARD, count=count, per_host=CARDS_PER_HOST)
    about = JobFile(
        micro_batches=4 * count, decoder=read_model(model), devices=(cards,), within_host=WITHIN, between_hosts=BETWEEN
    )
    return about.job()


def read_job(path: str | Path, devices: int | None = None) -> TrainingJob:
    """Reads a job from a file: JSON if the name ends in `.json`, else YAML.

    Args:
        path: Path of the file.
        devices: Number of devices instead of those in the file.

    Raises:
        JobError: The file cannot be read, or says something that cannot be: a line for each thing, with file, field,
            what was given and what was expected.
    """
    source = Path(path)
    try:
        about = read_file(source)
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{source}: cannot be read: {error}; expected a job as YAML or JSON") from None
    except ConfigurationError as error:
        raise JobError(str(error)) from None
    return job_of(about, source, devices)


def job_of(about: Any, source: str | Path = "job", devices: int | None = None) -> TrainingJob:
    """Returns the job for the values of a file, or for a result of `to_dict`.

    Args:
        about: Mappings, lists, texts and numbers.
        source: Name of the source in errors.
        devices: Number of devices instead of those described.

    Raises:
        JobError: The values describe no job.
    """
    from pydantic import ValidationError

    problems: list[str] = []
    try:
        tree = _in_numbers(about, "", problems)
        if not problems:
            tree = _in_parts(tree)
            read: JobFile = _adapter().validate_json(json.dumps(tree, default=repr), strict=True)
            return read.job(devices)
    except ValidationError as error:
        problems = [_in_words(x) for x in error.errors(include_url=False)]
    except JobError as error:
        problems = [str(error)]
    more = [f"and {len(problems) - MOST_ERRORS} more"] if len(problems) > MOST_ERRORS else []
    raise JobError("\n".join(f"{source}: {line}" for line in [*problems[:MOST_ERRORS], *more]))


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(JobFile)


def _in_numbers(value: Any, path: str, problems: list[str], depth: int = 0) -> Any:
    """Returns the values of a file with each quantity as a number in its field's unit; adds an error to `problems` for
    each text that is none.
    """
    if depth > _MAX_DEPTH:
        raise JobError(f"{path}: nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list | tuple):
        return [_in_numbers(x, f"{path}[{i}]", problems, depth + 1) for i, x in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, x in value.items():
        where = f"{path}.{key}" if path else str(key)
        unit = next((u for u in _UNITS if str(key).endswith(u)), None)
        found[str(key)] = _number(x, unit, where, problems) if unit else _in_numbers(x, where, problems, depth + 1)
    return found


def _number(value: Any, unit: str, path: str, problems: list[str]) -> Any:
    """Returns the number that a text such as "20 ms" stands for; other values unchanged."""
    parse, expected = _UNITS[unit]
    if isinstance(value, float) and value.is_integer() and unit == "_nbytes":
        return int(value)
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError:
        problems.append(f"{path} is {value!r}; expected {expected}")
        return value


def _in_parts(tree: Any) -> Any:
    """Returns the values of a file with the fields of each layer or device moved into a mapping of their own."""
    if not isinstance(tree, dict):
        return tree
    found = dict(tree)
    for key, (entry, part) in _PARTS.items():
        own = {f.name for f in fields(entry)} - {part}
        if isinstance(tree.get(key), list):
            found[key] = [
                {k: v for k, v in x.items() if k in own} | {part: {k: v for k, v in x.items() if k not in own}}
                if isinstance(x, dict)
                else x
                for x in tree[key]
            ]
    return found


_PARTS: dict[str, tuple[type, str]] = {"layers": (LayerEntry, "layer"), "devices": (DeviceEntry, "device")}
"""Class into which an entry is read, by key, and its field for the values of the layer or device itself."""


# ------------------------------------------------------------------------------------------------ in words


def _in_words(error: Mapping[str, Any]) -> str:
    """Returns a pydantic error as one line of text."""
    kind, loc, given = error["type"], error["loc"], error["input"]
    if len(loc) > 2 and loc[0] in _PARTS and loc[2] == _PARTS[loc[0]][1]:
        loc = (*loc[:2], *loc[3:])
    path = _path(loc)
    name = str(loc[-1]) if loc else ""
    if kind == "value_error":
        return _below(path, str(error["ctx"]["error"]), given)
    if kind == "missing":
        return f"{path} is missing; expected {_wanted(name) or 'a value'}"
    if kind == "unexpected_keyword_argument":
        known = _known(loc[:-1])
        near = difflib.get_close_matches(name, known, 1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{path} is an unknown key{meant}; expected some of {', '.join(known)}"
    shown = "nothing" if given is None else json.dumps(given, default=repr)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{path or 'the file'} is {shown}; expected {_wanted(name) or _EXPECTED.get(kind) or error['msg']}"


def _below(path: str, problem: str, given: Any) -> str:
    """Returns a dataclass's error text with its path in the file in front; if the text begins with a field's name, that
    becomes part of the path.
    """
    name = given.get("name") if isinstance(given, Mapping) else None
    for words in (f"layer {name!r}: ", f"device {name!r}: ", "a link's ", f"{path}: "):
        problem = problem.removeprefix(words)
    if not path:
        return problem
    return f"{path}.{problem}" if problem.split(" ", 1)[0] in given else f"{path}: {problem}"


def _path(loc: Sequence[str | int]) -> str:
    return "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in loc).removeprefix(".")


def _wanted(name: str) -> str:
    return next((expected for unit, (_, expected) in _UNITS.items() if name.endswith(unit)), "")


_CLASSES: dict[str, type] = {
    "": JobFile,
    "layers": Layer,
    "devices": Device,
    "decoder": Decoder,
    "within_host": LinkRate,
    "between_hosts": LinkRate,
    "links": NamedLink,
    "overheads": Overheads,
    "memory": MemoryRules,
}
"""Class of the value at a place in the file, by the place's first key."""


def _known(loc: Sequence[str | int]) -> list[str]:
    top = str(loc[0]) if loc else ""
    entry, part = _PARTS.get(top, (None, ""))
    own = [f.name for f in fields(entry) if f.name != part] if entry else []
    return [*(f.name for f in fields(_CLASSES[top])), *own]


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a job's file, for editors."""
    found: dict[str, Any] = _adapter().json_schema()
    found["title"] = "A job of chaos-lightning plan"
    for entry, part in _PARTS.values():
        about, own = found["$defs"][entry.__name__], found["$defs"].pop(part.title())
        del about["properties"][part]
        about["properties"], about["required"] = own["properties"] | about["properties"], own["required"]
    for about in (found, *found["$defs"].values()):
        for name, value in about["properties"].items():
            if expected := _wanted(name):
                about["properties"][name] = {"type": ["number", "string"], "description": expected}
                if value.get("default"):
                    del value["default"]
    return found


# ------------------------------------------------------------------------------------------------ writing


def to_dict(job: TrainingJob) -> dict[str, Any]:
    """Returns the job as JSON values that `job_of` reads back; fields with their default are left out."""
    about: dict[str, Any] = {"micro_batches": job.micro_batches}
    for name, value in (
        ("layers", job.layers),
        ("devices", job.devices),
        ("samples", job.samples),
        ("within_host", job.within_host),
        ("between_hosts", job.between_hosts),
        ("links", job.links),
        ("overheads", job.overheads),
        ("memory", job.memory),
        ("tied_nbytes", job.tied_nbytes),
    ):
        plain = [_plain(x) for x in value] if isinstance(value, tuple) else _plain(value)
        if plain not in ([], {}) and (name != "tied_nbytes" or value):
            about[name] = plain
    return about


def _plain(value: Any) -> Any:
    if isinstance(value, int):
        return value
    needed = {f.name: f.default for f in fields(value)}
    return {name: x for name, x in asdict(value).items() if needed[name] is MISSING or x != needed[name]}
