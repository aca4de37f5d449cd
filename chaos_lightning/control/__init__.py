"""The control plane: stores, election, the scheduler's server, agents."""
