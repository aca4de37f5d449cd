"""Declares settings, each once: as a dataclass field with default, help text and check.

Theory of operation. `setting` makes such a field, and `declared` reads a class's settings back. All else is derived
from them: what command lines, torchrun, Hydra, jsonargparse and the environment take, how text becomes a value, what
is refused and in which words, and the tables in docs/settings.md. Type checkers see a plain dataclass.

A setting's name ends in its unit (`timeout_s`, `nbytes`), its type is that of its default, and the first sentence of
its help can stand alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_type_hints

from chaos_lightning.errors import ConfigurationError

T = TypeVar("T")
Check = Callable[[Any], str]
"""Function that returns what is wrong with a value, as in "expected a positive number"; "" if nothing is."""

PREFIX = "CHAOS_"
"""Beginning of the environment variables of this package."""

_KEY = "chaos_lightning"
_BOOLEANS = {"0": False, "no": False, "false": False, "1": True, "yes": True, "true": True}
_EXPECTED = {bool: "0 or 1", int: "a whole number", float: "a number", str: "a text"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Description of a setting, as its dataclass field declares it.

    Attributes:
        name: Name of the field; also in --rdzv-conf, in Hydra and in `ChaosOptions`.
        default: Default, whose type is the setting's.
        help: Help in sentences; the first one can stand alone.
        check: Function that returns what is wrong with a value. Without one seconds (`..._s`) must be positive, and all
            else is right.
        absolute: Function that returns the same value for a process that may run in another folder.
        metavar: Placeholder of the value in the help of a command.
        prefix: Beginning of its environment variable. Another one tells settings apart that share a name and mean
            different things in one process.
    """

    name: str = ""
    default: Any
    help: str
    check: Check | None = None
    absolute: Callable[[str], str] | None = None
    metavar: str = ""
    prefix: str = PREFIX

    @property
    def kind(self) -> type:
        """Type of the setting: bool, int, float or str."""
        return type(self.default)

    @property
    def short(self) -> str:
        """First sentence of the help, without its full stop."""
        return re.split(r"\.(?:\s|$)", self.help, maxsplit=1)[0]

    @property
    def shown(self) -> str:
        """Default as it is shown in help texts; "" for none."""
        return f"{self.default:g}" if self.kind in (bool, float) else str(self.default)

    @property
    def variable(self) -> str:
        """Name of the environment variable for the setting."""
        return f"{self.prefix}{self.name.upper()}"

    @property
    def option(self) -> str:
        """Command-line option for the setting; its name lacks the unit `_s`."""
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    def read(self, given: object, where: str) -> Any:
        """Converts a text or JSON value to this setting's type.

        Args:
            given: The text or value.
            where: Name that the user wrote before the value, for the error.

        Raises:
            ConfigurationError: The value is of another type.
        """
        try:
            if self.kind is bool:
                return given if isinstance(given, bool) else _BOOLEANS[str(given).lower()]
            if self.kind is str and not isinstance(given, str):
                raise TypeError(given)
            if isinstance(given, bool) or (self.kind is int and isinstance(given, float) and given != int(given)):
                raise TypeError(given)
            return self.kind(given)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise ConfigurationError(f"{where}={given!r}: expected {_EXPECTED[self.kind]}") from error

    def demand(self, value: Any, where: str = "") -> None:
        """Raises ConfigurationError if this value is not allowed; `where` is the setting's name for the user."""
        check = self.check or (positive("seconds") if self.name.endswith("_s") else None)
        if check is not None and (wrong := check(value)):
            raise ConfigurationError(f"{where or self.name}={value!r}: {wrong}")


def setting(
    default: T,
    help: str,
    *,
    check: Check | None = None,
    absolute: Callable[[str], str] | None = None,
    metavar: str = "",
    prefix: str = PREFIX,
) -> T:
    """Declares a dataclass field as a setting for users; see `Setting`."""
    made = Setting(default=default, help=help, check=check, absolute=absolute, metavar=metavar, prefix=prefix)
    return dataclasses.field(default=default, metadata={_KEY: made})


def same_as(owner: type, name: str, **changes: Any) -> Any:
    """Declares a field with the same setting as in another class, except for `changes` to attributes of `Setting`."""
    made = dataclasses.replace(declared(owner)[name], **changes)
    return dataclasses.field(default=made.default, metadata={_KEY: made})


def declared(owner: type) -> Mapping[str, Setting]:
    """Returns the settings of a dataclass by name, in the order of its fields."""
    return {
        f.name: dataclasses.replace(f.metadata[_KEY], name=f.name)
        for f in dataclasses.fields(owner)
        if _KEY in f.metadata
    }


def optional(*owners: type, names: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """Returns settings as fields for `make_dataclass`, with None as the default, which means that no value was given.

    Args:
        owners: Classes that declare the settings.
        names: Names of the settings that are wanted, in order; by default all.
    """
    found: dict[str, tuple[str, Any, Any]] = {}
    for owner in owners:
        hints = get_type_hints(owner)
        found |= {name: (name, hints[name] | None, same_as(owner, name, default=None)) for name in declared(owner)}
    return [found[name] for name in names or found]


def optional_base(module: str, *owners: type, without: Collection[str]) -> type:
    """Makes a base class with the settings of these classes, except those that are arguments of a strategy.

    Args:
        module: Name of the caller's module.
        owners: Classes that declare settings.
        without: Names of the strategy's arguments.
    """
    made = [field for field in optional(*owners) if field[0] not in without]
    return dataclasses.make_dataclass("_Options", made, namespace={"__module__": module}, frozen=True, kw_only=True)


def options_of(owner: type[T], given: T | Mapping[str, Any] | None) -> T:
    """Returns an instance of an options class, made from whatever Hydra, jsonargparse or a user passed.

    Args:
        owner: Class of the options.
        given: Instance of it, a mapping of its fields, or None.

    Raises:
        ConfigurationError: The value is none of these, or names an unknown option.
    """
    if isinstance(given, owner):
        return given
    if not isinstance(given, Mapping | None):
        raise ConfigurationError(f"options is a {type(given).__name__}; expected {owner.__name__} or a mapping")
    known = sorted(declared(owner))
    if unknown := sorted(set(given or {}) - set(known)):
        raise ConfigurationError(f"unknown options {unknown}; expected some of {known}")
    return owner(**(given or {}))


def absolute(instance: T) -> T:
    """Returns a copy of the settings with absolute paths, for a process that may run in another folder."""
    rows = declared(type(instance)).items()
    paths = {name: made.absolute(getattr(instance, name)) for name, made in rows if made.absolute is not None}
    return dataclasses.replace(instance, **paths)  # type: ignore[type-var]


def check_each(instance: Any) -> None:
    """Checks the value of each setting separately.

    Raises:
        ConfigurationError: A value is wrong; names the setting, what was given and what is expected.
    """
    for name, made in declared(type(instance)).items():
        made.demand(getattr(instance, name))


def document(owner: type) -> None:
    """Adds the help texts of a class's settings to its docstring, for `help`, IDEs and jsonargparse."""
    told = "".join(f"\n        {made.name}: {made.help}" for made in declared(owner).values())
    owner.__doc__ = f"{(owner.__doc__ or '').rstrip()}\n\n    Attributes:{told}\n    "


# ------------------------------------------------------------------------------------------------ command lines


def command_line(instance: Any) -> list[str]:
    """Returns command-line options for those settings of this instance that differ from the default."""
    words = []
    for name, made in declared(type(instance)).items():
        value = getattr(instance, name)
        if value != made.default:
            words.append(made.option if made.kind is bool else f"{made.option}={value}")
    return words


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Setting]) -> None:
    """Adds a command-line option for each of these settings to a parser; values stay text, for `read_options`."""
    for name, option in options.items():
        switch = option.kind is bool
        how: dict[str, Any] = {"action": "store_true"} if switch else {"metavar": option.metavar or "VALUE"}
        default = f" (default: {option.shown})" if option.shown and not switch else ""
        parser.add_argument(option.option, dest=name, help=f"{option.help}{default}".replace("%", "%%"), **how)


def read_options(given: argparse.Namespace, options: Mapping[str, Setting]) -> dict[str, Any]:
    """Converts the values of those settings that were given on the command line.

    Raises:
        ConfigurationError: A value is of another type.
    """
    return {name: option.read(vars(given)[name], option.option) for name, option in options.items() if name in given}


# ------------------------------------------------------------------------------------------------ checks


def positive(what: str) -> Check:
    """Makes a check that a value is a finite number above 0; `what` names its unit in the error text."""
    return lambda value: "" if 0 < value < math.inf else f"expected a positive number of {what}"


def at_least(least: float, what: str) -> Check:
    """Makes a check that a value is a finite number, at least `least`; `what` describes it in the error text."""
    return lambda value: "" if least <= value < math.inf else f"expected {what}"


def one_of(names: Collection[str]) -> Check:
    """Makes a check that a value is one of these names."""
    return lambda value: "" if value in names else f"expected one of {', '.join(names)}"
