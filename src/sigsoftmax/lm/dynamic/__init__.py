"""Dynamic evaluation: the model that goes on learning while it is tested."""
