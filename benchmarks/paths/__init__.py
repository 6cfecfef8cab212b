"""The paths that `benchmarks/dataplane.py` compares, one file for each system."""
