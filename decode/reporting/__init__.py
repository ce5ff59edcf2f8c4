"""How a command says what it found: statistics, tables, figures, run files, places to write."""
