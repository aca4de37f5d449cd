"""Access: credentials, keys, roles, certificates."""
