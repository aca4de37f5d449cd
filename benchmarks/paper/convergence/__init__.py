"""Figures 11 to 14: the effect of nodes that come and go on convergence."""
