"""Parts of one member of a job."""
