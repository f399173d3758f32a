"""Which sample goes where: policies over the samples of one global batch. Pure: no torch, no I/O."""
