"""Which sessions there are, where each is, who leaves, and how they are moved."""
