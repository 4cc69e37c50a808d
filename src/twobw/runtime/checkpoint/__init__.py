"""Checkpoints on disk: what they hold, how they are written while training goes on, and read."""
