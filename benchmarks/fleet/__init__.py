"""How many replicas carry a load, simulated from recordings: `python -m benchmarks.fleet`."""
