"""Tokens on disk and on their way to a batch."""
