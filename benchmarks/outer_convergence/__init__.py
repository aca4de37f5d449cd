"""How outer sync converges in virtual time: policies against each other, and against poison (outer_convergence)."""
