"""Soak test of a real job whose members join, leave, die, freeze and lose links, compared with undisturbed training."""
