"""The static parallel plan: which layers on which rank. Pure: no torch, no I/O."""
