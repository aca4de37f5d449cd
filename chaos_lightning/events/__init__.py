"""The event log: its names, its writer and its reader."""
