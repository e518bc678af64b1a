"""Models that benchmarks plan, written in plain PyTorch."""
