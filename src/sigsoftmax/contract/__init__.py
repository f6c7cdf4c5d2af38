"""The contract between losses and backends: the specification of a call, its tensors, and the arithmetic of a token."""
