"""Masks for tests that compare passes."""

from sigsoftmax.lm.model.regularization import MaskSampler


def draw_masks(config, *, words, batch, generator):
    """New masks in float32, on the generator's device."""
    return MaskSampler(config, vocabulary_size=words, batch=batch, device=generator.device).draw(generator)
