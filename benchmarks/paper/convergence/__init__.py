"""Figures 11 to 14: what coming and going does to convergence."""
