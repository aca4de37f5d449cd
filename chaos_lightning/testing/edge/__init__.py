"""Emulated edge networks: what they are, how they are carried out, and a command on every node of one."""
