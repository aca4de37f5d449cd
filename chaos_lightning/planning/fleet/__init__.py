"""A simulated fleet: which policy trains most while devices come and go."""
