"""What a run writes to disk and reads again: its folder, checkpoints, the state to resume from, and the exported model."""
