"""Members of a real job come, go, die, freeze and lose their links, and what training made of it."""
