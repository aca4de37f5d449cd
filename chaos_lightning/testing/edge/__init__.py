"""Emulated edge networks: their description, their emulation, and a tool that runs a command on each of their nodes."""
