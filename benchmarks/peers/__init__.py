"""Peers under the same blows: torchft, torchrun, and their coordinators."""
