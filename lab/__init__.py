"""Tools with which developers break the product: simulated jobs, planted bugs, hostile bytes. They are in no wheel."""
