"""Developers' tools to break the product: simulated jobs, planted bugs, hostile bytes; not part of the wheel."""
