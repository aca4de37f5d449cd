"""Tools with which users break their own runs on purpose: fault plans, a process harness, emulated links, demos."""
