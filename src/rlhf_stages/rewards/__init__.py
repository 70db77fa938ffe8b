"""Rewards of PPO: learned, of text, of a user's own, and their weighted sum."""
