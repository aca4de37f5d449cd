"""Encodes the values of small collectives as bytes, and decodes them, by type and without pickle.

Layout: 4 bytes length of the text, the text (replication/manifest.py), then for each attached tensor, in order: 2 bytes
length of its description `name|dtype|d0,d1,...`, the description, and its raw bytes.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chaos_lightning.errors import StateError, WireError
from chaos_lightning.replication.manifest import decode_manifest, encode_manifest
from chaos_lightning.replication.table import DTYPES, dtype_name


def encode_payload(value: Any) -> bytes:
    """Encodes a value of plain types, containers and tensors; raises StateError that names a value of another type."""
    encoded = encode_manifest(value)
    parts = [struct.pack("<I", len(encoded.data)), encoded.data]
    for name, tensor in encoded.tensors:
        shape = ",".join(map(str, tensor.shape))
        head = f"{name}|{dtype_name(tensor.dtype)}|{shape}".encode()
        if len(head) > 65535:
            raise StateError(f"the path of a tensor in this value is {len(head)} bytes long; flatten the value")
        parts += [struct.pack("<H", len(head)), head, _bytes_of(tensor)]
    return b"".join(parts)


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def decode_payload(data: bytes, device: torch.device | str = "cpu") -> Any:
    """Reads a value that `encode_payload` wrote, with tensors on `device`.

    Raises:
        WireError: The bytes are not of the form that `encode_payload` writes.
    """
    try:
        (length,) = struct.unpack_from("<I", data)
        text, at = data[4 : 4 + length], 4 + length
        if len(text) != length:
            raise WireError("a collective's payload ends within its text")
        tensors: dict[str, Tensor] = {}
        while at < len(data):
            (size,) = struct.unpack_from("<H", data, at)
            name, dtype_text, shape_text = data[at + 2 : at + 2 + size].decode().rsplit("|", 2)
            at += 2 + size
            shape, dtype = [int(d) for d in shape_text.split(",") if d], DTYPES[dtype_text]
            nbytes = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or at + nbytes > len(data):
                raise WireError(
                    f"a collective's payload announces {nbytes} bytes for {name!r} and holds {len(data) - at}"
                )
            tensor = torch.empty(shape, dtype=dtype)
            if nbytes:
                raw = torch.from_numpy(np.frombuffer(data, np.uint8, nbytes, at).copy())
                tensor.reshape(-1).view(torch.uint8).copy_(raw)
            at += nbytes
            tensors[name] = tensor.to(device)
        return decode_manifest(text, tensors)
    except (struct.error, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise WireError(f"malformed payload of a collective: {error!r}") from error
