"""Analyses of output layers: spectra and ranks, the least KL that every head can reach, and audits."""
