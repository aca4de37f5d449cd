"""Pure functions: data in, a plan and a reason out. No torch, no clock, no randomness of its own."""
