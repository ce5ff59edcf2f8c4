"""Load generators of other projects against this server and vLLM's: `python -m
benchmarks.serve_load`."""
