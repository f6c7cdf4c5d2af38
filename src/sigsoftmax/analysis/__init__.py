"""What an output layer can express and what it does express: spectra, ranks, and the least KL of every head."""
