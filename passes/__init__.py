"""The compiler: one pass a file, in the order of the flow (see ``pipeline.py``)."""

if __name__ != "autopar.passes":
    raise ImportError("import autopar.passes, not passes: the folder is part of the package autopar")
