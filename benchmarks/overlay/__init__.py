"""All-reduce over an uneven overlay."""
