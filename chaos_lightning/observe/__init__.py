"""Shows what happened in a job: folds over the event log (timeline, audit, report, live view)."""
