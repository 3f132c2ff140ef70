"""Streaming: every stage is a loop of its own on its own worker group, and asks the transfer queue for rows that are ready."""
