"""What developers break the product with: simulated jobs, planted bugs, hostile bytes. It is in no wheel."""
