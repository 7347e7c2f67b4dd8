"""What operators ask, and what they are answered: figures, listings, orders."""
