"""The road of every loss and every log-probability: specify, lower, run."""
