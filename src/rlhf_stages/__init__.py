"""RLHF as a staged pipeline of plain scripts: SFT, reward model, PPO. Importing this package imports nothing heavy."""
