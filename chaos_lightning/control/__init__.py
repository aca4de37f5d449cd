"""The control plane: the scheduler's server, its stores and election, and the members' connection to it."""
