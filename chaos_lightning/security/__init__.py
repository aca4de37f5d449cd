"""Parts that control access: credentials, keys, roles, certificates."""
