"""Weights, tokenizer and the forward pass over the page pool."""
