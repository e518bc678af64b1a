"""The integer programs that choose a plan."""
