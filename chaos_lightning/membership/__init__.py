"""Membership: members, views and slots, and the state machines of member and scheduler that keep them consistent
(protocol.md).

Pure: no torch, socket, clock, thread or randomness. `MemberMachine` runs in every training process, `SchedulerMachine`
in the scheduler; both have one entrance, `on(now, event) -> [effects]`. The processes and the simulator are two shells
around them.
"""
