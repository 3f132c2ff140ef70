"""Device memory: `footprint` counts it before a run, `offload` moves weights and optimizer state off it and back."""
