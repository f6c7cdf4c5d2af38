"""What a model does to its logits and with its labels, found by running it on a few tokens."""
