"""Fast paths on a CPU: compiled kernels (`native`) behind `layers` and `attention`, `linear` and `fused` matrix products, and how the C
library keeps memory (`malloc`)."""
