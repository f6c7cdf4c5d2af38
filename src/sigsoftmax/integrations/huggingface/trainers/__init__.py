"""Libraries that train a patched model, and the retrofit of a trained softmax model."""
