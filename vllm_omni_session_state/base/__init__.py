"""What every room may import: errors, log, ids and settings. The standard library alone."""
