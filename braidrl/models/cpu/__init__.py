"""Fast paths on a CPU: compiled kernels (`native`) behind `layers` and `attention`, matrix products (`linear`), memory (`malloc`)."""
