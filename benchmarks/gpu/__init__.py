"""Measure everything that needs a GPU, one after another, and show it as tables."""
