"""How a global batch would run: every policy on a given plan, in predicted time, without a GPU."""
