"""Peak memory, limits of the CUDA allocator, and advice when memory runs out."""
