"""Text: corpora, fetched or one's own, and the ids, columns and windows that models read."""
