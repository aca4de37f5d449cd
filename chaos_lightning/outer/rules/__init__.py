"""Outer sync, pure: the leader's, a follower's and a cluster's state machines, and what they decide by."""
