"""Measures other systems under the same faults: torchft, torchrun, and their coordinators."""
