"""This machine: processes, locks, sockets, standard streams."""
