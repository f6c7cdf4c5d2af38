"""Output layers as modules of torch, and the modules of losses."""
