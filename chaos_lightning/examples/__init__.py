"""Models and data of the examples, which the Hydra groups `model` and `data` name; a wheel has them, too."""
