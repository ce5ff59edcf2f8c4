"""How many small faults the tests notice (mutation testing)."""
