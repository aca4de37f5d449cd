"""One member of a job."""
