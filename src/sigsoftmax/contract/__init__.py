"""What losses and backends share: the specification of a call, its tensors, and the arithmetic of a token."""
