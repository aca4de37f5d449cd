"""What two machines must agree on: types, messages and their encoding."""
