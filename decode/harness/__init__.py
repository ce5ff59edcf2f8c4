"""lm-evaluation-harness on our models: what `decode.lm_eval` runs."""
