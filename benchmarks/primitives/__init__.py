"""What connect-link, disconnect-link and scale-in cost those who train."""
