"""What one session holds: state objects, attributes, and how to look at them."""
