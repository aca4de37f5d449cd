"""What happened: one append-only event log, and folds over it (timeline, audit, report, live view)."""
