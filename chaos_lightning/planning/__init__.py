"""Holds planners: pure functions from data to a plan and its reason, without torch, clock or randomness of
their own.
"""
