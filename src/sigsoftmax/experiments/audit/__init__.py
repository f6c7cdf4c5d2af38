"""Audits of the output layer of a model: what another one would buy it."""
