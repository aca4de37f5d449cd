"""Tests the benchmark of a parameter server: programs that it is compared with, and the result if one is not
installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks import outer_data
from benchmarks.common import Options, Result


def test_a_peer_that_is_not_installed_counts_as_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Former bug: if a program to compare with was not installed, its comparison was skipped, and `--check` ended with
    0.
    """
    monkeypatch.setattr(outer_data, "MOST_TIME_OF_SOCKET", 1e9)
    result = Result("outer_server")
    outer_data.transfers(result, 1, 1, seed=1)
    absent = [name for name, module in (("pyzmq", "zmq"), ("gRPC", "grpc")) if find_spec(module) is None]
    assert result.left_out == absent
    for words, ended in (("--check", bool(absent)), ("--check --quick", False), ("", False)):
        assert result.finish(Options("").parse_args(words.split())) == ended
    said = capsys.readouterr().out
    assert [name for name in absent if f"{name} is left out: it is not installed" not in said] == []
