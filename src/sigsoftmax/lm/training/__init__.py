"""Training, evaluation and the files that a run leaves."""
