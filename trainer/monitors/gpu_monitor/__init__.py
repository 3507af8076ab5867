"""Samples of the GPU by NVML, and of the host beside it, in a thread."""
