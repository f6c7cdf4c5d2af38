"""Saving and loading patched models and their adapters."""
