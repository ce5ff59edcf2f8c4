"""A run of training: its folder, checkpoints, processes, stops, evaluation and what it leaves."""
