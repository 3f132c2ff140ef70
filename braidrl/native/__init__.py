"""Kernels in C for CPUs, and torch functions that call them. `building` compiles them for this processor."""
