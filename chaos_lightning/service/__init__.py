"""A durable, elected, authenticated service around a pure state machine and its vocabulary of messages."""
