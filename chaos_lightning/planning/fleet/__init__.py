"""Simulates fleets of devices that come and go, to see which policy trains most."""
