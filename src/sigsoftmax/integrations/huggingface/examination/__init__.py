"""Examination of a model: it is run on a few tokens to see what it does to its logits and with its labels."""
