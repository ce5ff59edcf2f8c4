"""Training: from-scratch models, the autoregressive baseline and D2F distillation."""
