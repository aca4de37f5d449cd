"""Tools for users who break a run of their own: fault plans, a process harness, emulated links, demos."""
