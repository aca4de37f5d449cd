"""Calls a function once a module is imported by somebody else.

Theory of operation. A finder at the front of `sys.meta_path` waits for some modules: it lets the ordinary finders find
them, wraps their loader, and calls the function after the module's own code has run. Modules of any other name pass
untouched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Loader(Loader):
    """Module loader that calls a function after the real loader has run the module."""

    def __init__(self, real: Loader, action: Action) -> None:
        self._real, self._action = real, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its real loader: tools look at it for sources and resources.
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._action(module)


class _Finder(MetaPathFinder):
    """Import finder that intercepts only its modules, and wraps their loaders."""

    def __init__(self, names: Collection[str], action: Action) -> None:
        self._names, self.action = names, action
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names or self._busy:
            return None
        self._busy = True
        try:
            spec = find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


def call_after_import(names: Collection[str], action: Action) -> None:
    """Calls a function with each of the named modules when it is imported later. Idempotent for the same function."""
    if not any(isinstance(finder, _Finder) and finder.action == action for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(names, action))
