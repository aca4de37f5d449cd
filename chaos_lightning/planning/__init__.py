"""Planners as pure functions: data in, a plan and a reason out. No torch, no clock, no randomness of their own."""
