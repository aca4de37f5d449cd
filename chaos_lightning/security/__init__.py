"""Access control: credentials, keys, roles and certificates."""
