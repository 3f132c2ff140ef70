"""Engines that turn prompts into trajectories."""
