"""Parts that deal with this machine: processes, locks, sockets, standard streams."""
