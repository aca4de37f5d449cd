"""Shows jobs of outer sync: folds over their event logs and chain, and the board, pictures and pages made of them."""
