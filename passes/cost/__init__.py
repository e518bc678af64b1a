"""What a program costs: devices, compute, collectives, memory. Pure arithmetic, units in names."""
