"""Tests the settings of glibc's allocator, each in a process of its own, since they cannot be undone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORK = """
import ctypes, re, sys, threading
from pathlib import Path
from chaos_lightning.machine.heap import give_back_large

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
libc.free.argtypes = libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]

def found():
    file = libc.fopen(sys.argv[1].encode(), b"w")
    assert libc.malloc_info(0, file) == 0
    libc.fclose(file)
    text = Path(sys.argv[1]).read_text()
    return len(re.findall("<heap nr=", text)), int(re.search('type="mmap" count="([0-9]+)"', text)[1])

if sys.argv[2] == "told":
    assert give_back_large()
met = threading.Barrier(5)

def work():
    met.wait()
    piece = libc.malloc(2000)
    met.wait()
    libc.free(piece)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
met.wait()
met.wait()
for thread in threads:
    thread.join()
libc.free(libc.malloc(16 << 20))
before = found()
libc.malloc(2 << 20)
after = found()
print(after[0] > 1, after[1] - before[1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="its allocator is not glibc's")
@pytest.mark.parametrize(("told", "several_heaps", "given_back"), [("told", False, 1), ("", True, 0)])
def test_large_pieces_are_given_back_and_all_others_come_from_one_heap(
    tmp_path: Path, told: str, several_heaps: bool, given_back: int
) -> None:
    command = [sys.executable, "-c", WORK, str(tmp_path / "info"), told]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(several_heaps), str(given_back)], done.stderr
