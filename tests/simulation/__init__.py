"""A streaming run in one process and in virtual time, with whatever goes wrong in it."""
