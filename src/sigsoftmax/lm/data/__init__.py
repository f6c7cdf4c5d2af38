"""Where text comes from, and how it becomes the ids that models read."""
