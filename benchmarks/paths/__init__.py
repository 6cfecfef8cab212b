"""The paths that `benchmarks/dataplane.py` compares, a file for each system."""
