"""Measures step times without any failure."""
