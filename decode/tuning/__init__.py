"""The parts of `python -m decode.tune`: the settings, their measurement, the search, the choice."""
