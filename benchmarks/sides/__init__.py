"""What is measured: each module holds one side of a comparison, as a function `prepare(case)` that returns one measured turn."""
