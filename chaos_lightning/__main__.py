"""Runs the command `chaos-lightning` as `python -m chaos_lightning`, in case the command is not on the PATH."""

from __future__ import annotations

from chaos_lightning.cli import main

if __name__ == "__main__":
    main()
