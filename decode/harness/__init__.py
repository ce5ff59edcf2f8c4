"""Run our models in lm-evaluation-harness."""
