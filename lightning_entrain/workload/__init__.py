"""What a sample costs: sizes, token rules and cost models. Pure: no torch, no I/O."""
