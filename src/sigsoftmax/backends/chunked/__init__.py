"""Losses and log-probabilities a chunk of logits at a time: what all fast backends share."""
