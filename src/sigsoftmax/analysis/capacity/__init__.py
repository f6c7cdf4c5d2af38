"""The least KL that each output head can reach at a width, on distributions that are known."""
