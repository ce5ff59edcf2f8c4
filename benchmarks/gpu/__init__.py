"""Every measurement that needs a GPU, run one after another, kept, and shown as tables."""
