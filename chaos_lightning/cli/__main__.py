"""Lets `python -m chaos_lightning.cli` be the command `chaos-lightning`."""

from __future__ import annotations

from chaos_lightning.cli import main

if __name__ == "__main__":
    main()
