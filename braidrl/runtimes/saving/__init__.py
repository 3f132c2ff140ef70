"""Files of a run: its folder, checkpoints, the resume state, and the exported model."""
