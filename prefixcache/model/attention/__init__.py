"""Attention over runs of pages: one interface, a CPU and a CUDA back end."""
