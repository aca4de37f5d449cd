"""Shows what happened: folds over the event log (timeline, audit, report, live view)."""
