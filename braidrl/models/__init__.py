"""A role's model: loading, attention over packed sequences, training and inference steps."""
