"""Types, messages and their encoding: all that two machines must agree on."""
