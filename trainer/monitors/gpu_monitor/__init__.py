"""Samples the GPU through NVML, and the host, in a thread."""
