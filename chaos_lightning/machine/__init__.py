"""What is particular to this machine: processes, locks, sockets, standard streams."""
