"""How a session's bytes move and are kept: packing, files, host memory, the disk."""
