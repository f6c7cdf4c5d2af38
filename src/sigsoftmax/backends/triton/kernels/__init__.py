"""Code that runs on the device: formulas transcribed once, rows of logits, and the kernels that finish a loss."""
