"""Thousands of mixed requests to a server, each answer compared: `python -m benchmarks.soak`."""
