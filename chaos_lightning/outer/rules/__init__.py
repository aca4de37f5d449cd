"""Outer sync, pure: state machines of the leader, a follower and a cluster, and the rules by which they decide."""
