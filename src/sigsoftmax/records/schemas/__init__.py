"""The payloads of records, one module for each kind of measurement."""
