"""Puts every Python interpreter with this folder in PYTHONPATH on an emulated network (emulation.py)."""

import importlib.machinery
import importlib.util
import os
import sys

try:
    from chaos_lightning.errors import ConfigurationError
    from chaos_lightning.testing.emulation import install_from
except ModuleNotFoundError as error:
    # Other programs are written in Python, too, and have packages of their own.
    print(f"{sys.executable} is not on the emulated network: {error}", file=sys.stderr)
else:
    try:
        install_from(os.environ)
    except ConfigurationError as error:  # site would pass over it
        sys.exit(f"error: {error}")

_elsewhere = [path for path in sys.path if path != os.path.dirname(__file__)]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _elsewhere)
if _hidden is not None and _hidden.loader is not None:  # the machine's own
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
