"""The ILP over split choices: layout graphs, the problem, exact reductions, the solver and its answer."""
