"""Settings that every test runs under; set before torch starts its threads."""

import os

# Several processes share the cores; more threads each only make them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
