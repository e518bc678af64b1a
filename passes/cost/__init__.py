"""Devices, compute, collectives and memory: pure arithmetic, units in the names."""
