"""Defines the types and messages that machines exchange, and their encoding."""
