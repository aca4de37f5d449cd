"""What protection of links costs."""
