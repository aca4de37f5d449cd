"""Tests that each module of the benchmarks and of the lab can be imported: slow tests alone run some of them."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import benchmarks
import lab

MODULES = sorted(
    found.name
    for package in (benchmarks, lab)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_can_be_imported(name: str) -> None:
    assert importlib.import_module(name)
