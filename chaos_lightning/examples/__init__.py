"""Models and data of the examples, installed with the package; the Hydra groups `model` and `data` refer to them."""
