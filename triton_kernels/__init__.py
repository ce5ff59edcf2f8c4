"""Triton kernels, one file each with its plain PyTorch reference."""
