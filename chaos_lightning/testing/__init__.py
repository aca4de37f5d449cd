"""What users need to break a run of their own: fault plans, a process harness, emulated links, demos."""
