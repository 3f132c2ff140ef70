"""Starting processes and ending them."""
