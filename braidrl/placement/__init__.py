"""Where roles live and when they run: residency of several roles in one process, simulation, and plans."""
