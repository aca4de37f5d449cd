"""The event log: its writer, its reader, and the registry of event names."""
