"""Echelon: a PyTorch trainer in which every distributed-training optimisation is a callback. Imports nothing heavy."""

__version__ = "0.1.0"
