"""Fast paths on a CPU: compiled kernels (`native`) behind `layers` and `attention`, matrix products (`linear`), and how the C library
keeps memory (`malloc`).
"""
