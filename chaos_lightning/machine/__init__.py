"""Helpers for the local machine: processes, locks, sockets, standard streams."""
