"""Soak of a real job whose members come, go, die, freeze and lose their links, compared with undisturbed training."""
