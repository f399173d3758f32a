"""Lightning callbacks that show workload variability."""
