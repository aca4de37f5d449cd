"""What is told of a job of outer sync: folds over its event logs and its chain, drawn as the plain ones are."""
