"""Tests that the limit of open files is raised as far as needed and allowed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaos_lightning.control import scheduler_main

_PROGRAM = """
import resource
from chaos_lightning.machine.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
for count in (50, 150, 120, 500):
    print(allow_descriptors(count), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_grows_to_what_is_needed_and_the_hard_one_stays() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["100 100 200", "150 150 200", "150 150 200", "200 200 200"]


def test_a_scheduler_says_for_how_many_members_its_descriptors_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_main, "allow_descriptors", lambda count: 1024)
    assert scheduler_main._take_all_descriptors(960, keys=False) == ""
    assert scheduler_main._take_all_descriptors(320, keys=True) == ""
    words = scheduler_main._take_all_descriptors(512, keys=True)
    assert "max_nodes=512 needs 1600 open files, and this process may have 1024: from about 320 members on" in words
