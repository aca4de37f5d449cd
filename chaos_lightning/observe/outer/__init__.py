"""Shows jobs of outer sync: folds over their event logs and chain, drawn as the plain ones are."""
