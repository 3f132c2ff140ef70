"""Starting processes, and what those of one run say to each other."""
