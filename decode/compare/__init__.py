"""The parts of `python -m decode.compare`: entries, their measurement, the report."""
