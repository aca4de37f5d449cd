"""Benchmarks: each module runs alone, compares with a peer in the same run, and can be checked (`--check`)."""
