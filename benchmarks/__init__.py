"""Benchmarks: each module runs alone, compares with another system in the same run, and can be checked (`--check`)."""

import os

# Benchmarks that measure events say where they go; no others are to fill this user's folder.
os.environ.setdefault("CHAOS_LOG_DIR", "none")
