"""Tools for breaking and checking a run, shipped for users' own tests too: fault plans, a process harness, checkers."""
