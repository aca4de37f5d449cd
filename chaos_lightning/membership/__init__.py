"""Membership: members, views, slots, and the two state machines that keep them in step (protocol.md).

Pure: no torch, socket, clock, thread or randomness. `MemberMachine` runs in every training process, `SchedulerMachine`
in the scheduler; both have one entrance, `on(now, event) -> [effects]`. The processes and the simulator are two shells
around them.
"""
