"""Files of models and runs: what a checkpoint holds, and the checks of one before it is used."""
