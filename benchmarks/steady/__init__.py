"""Step time without any failure."""
