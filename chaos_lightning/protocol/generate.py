"""Generates Python stubs from all .proto files, beside them: `python -m chaos_lightning.protocol.generate`.

Needs grpcio-tools (in the `dev` extra); the committed results need only grpcio and protobuf. The stubs demand at least
the versions of grpcio and protobuf they were generated with, so regenerate with the oldest grpcio-tools that
pyproject.toml's lower bounds allow, or raise the bounds.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = {
    "protocol/chaos": ("python_out",),
    "control/service": ("grpc_python_out",),
    "service/etcd": ("python_out",),
    "outer/exchange/outer": ("python_out", "grpc_python_out"),
}
"""Outputs of protoc by .proto file; etcd's methods are called by name, as its messages have a package name of ours."""


def generate(out: Path = ROOT) -> None:
    """Generates the stubs of all .proto files below `out`, in the same subfolders."""
    try:
        protoc = importlib.import_module("grpc_tools.protoc")
    except ImportError as error:
        raise SystemExit("grpcio-tools is not installed; pip install 'chaos-lightning[dev]'") from error
    for name, outputs in PROTOS.items():
        proto = f"chaos_lightning/{name}.proto"
        if protoc.main(["protoc", f"-I{ROOT}", *(f"--{output}={out}" for output in outputs), proto]) != 0:
            raise SystemExit(f"protoc refused {proto}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
