"""Who may do what: credentials, keys, roles, certificates."""
