"""The generated tasks as tasks of lm-evaluation-harness: its --include_path."""
