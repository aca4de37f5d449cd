"""Random plans of simulated jobs, sorted by what goes wrong: members, learners, links, schedulers; families.py draws
from all of them.
"""
