"""Outer sync without input or output: the state machines of leader, follower and cluster, and the rules by which they
decide.
"""
