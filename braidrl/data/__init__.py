"""Rows and columns, how they travel, and where prompts come from."""
