"""Kernels in C for the CPU, and their compilation for this processor."""
