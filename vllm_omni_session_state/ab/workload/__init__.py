"""What clients send in a run: requests, drawn from a seed or read from a file."""
