"""Where roles live and when they run: residency of several roles in one process, and a simulator of all runtimes."""
