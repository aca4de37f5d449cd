"""Outer sync: main programs of the parameter server, and commands with which operators inspect, end and export its
job.
"""
