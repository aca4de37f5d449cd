"""Benchmarks: each module runs alone, compares with a peer in the same run, and can be checked (`--check`)."""

import os

# What measures events says where they go; nothing else is to fill the folder of who runs this.
os.environ.setdefault("CHAOS_LOG_DIR", "none")
