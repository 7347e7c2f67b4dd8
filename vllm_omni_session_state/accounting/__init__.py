"""How many bytes: the memory that values keep alive, by device and by owner."""
