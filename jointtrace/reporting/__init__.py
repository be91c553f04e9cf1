"""Reports and dumps of what was compiled."""
