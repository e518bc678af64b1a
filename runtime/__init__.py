"""Runs lowered programs on torch.distributed, and simulates all ranks in one process."""

if __name__ != "autopar.runtime":
    raise ImportError("import autopar.runtime, not runtime: the folder is part of the package autopar")
