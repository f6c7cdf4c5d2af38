"""The paper's tables from whole runs: what is to be run, how long it takes, and what gives way."""
