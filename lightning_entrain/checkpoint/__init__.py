"""Checkpoints: what is saved, how it is written, and how any layout reads it."""
