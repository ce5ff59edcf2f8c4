"""The parts of the command `python -m decode.pipeline`."""
