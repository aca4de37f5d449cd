"""Simulates training jobs around the real state machines: seeded and event-driven, with crashes, network faults and
store failures.

`python -m lab.simulate --help`. The machines of membership/ run unchanged; network, processes, store,
data plane and training are simulated (world.py ties them together), oracle.py says what must hold, bugs/ breaks each
rule of protocol.md once to show that it would be noticed.
"""
