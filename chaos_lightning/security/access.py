"""Access by a cluster token, and the check that schedulers and members do not listen openly without one.

Theory of operation. A job is open to every process that can reach its ports and has its credentials: a folder of keys
(security/credentials.py), or the weaker token alone. Without any only loopback may be listened on. The token is read
from a file or from the environment, never from a command line, where every user of the machine could read it. Links
between members prove it without sending it (transport/handshake.py); on the control stream it travels as gRPC metadata,
which is encrypted only where there are keys: with a token alone, keep the scheduler's port inside a network you trust.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from chaos_lightning.errors import ConfigurationError

logger = logging.getLogger("chaos_lightning.security")

TOKEN_KEY = "chaos-token-bin"
"""gRPC metadata key of the token; "-bin" keys may hold any bytes."""
LEADER_KEY = "chaos-leader"
"""gRPC metadata key by which a scheduler that waits to lead says who does."""
MIN_TOKEN_NBYTES = 8


def load_token(token_file: str = "", environ: Mapping[str, str] = os.environ) -> bytes:
    """Reads the cluster token: from this file, else the file CHAOS_TOKEN_FILE, else the variable CHAOS_TOKEN; b"" if
    none is set.

    Raises:
        ConfigurationError: The file cannot be read, or the token is too short to keep anybody out.
    """
    path = token_file or environ.get("CHAOS_TOKEN_FILE", "")
    if path:
        source = f"token file {path}"
        try:
            token = Path(path).read_bytes().strip()
            mode = Path(path).stat().st_mode
        except OSError as error:
            raise ConfigurationError(
                f"{source} cannot be read: {error.strerror}; write one with, for example: "
                f"(umask 077; head -c 32 /dev/urandom | base64 > {path})"
            ) from error
        if mode & (stat.S_IRWXO | stat.S_IRWXG):
            logger.warning("%s can be read by others (mode %o); chmod 600 it", source, stat.S_IMODE(mode))
        if not token:
            raise ConfigurationError(f"{source} is empty")
    else:
        source = "the token in CHAOS_TOKEN"
        token = environ.get("CHAOS_TOKEN", "").strip().encode()
    if token and len(token) < MIN_TOKEN_NBYTES:
        raise ConfigurationError(f"{source} has {len(token)} bytes, at least {MIN_TOKEN_NBYTES} are needed")
    return token
