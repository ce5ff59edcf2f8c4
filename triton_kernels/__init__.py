"""One file a kernel, its plain PyTorch reference beside it."""
