"""Compares in virtual time how the policies of outer sync converge, also with poisoned pushes."""
