"""Writers of tiny checkpoints in the real on-disk layout, one file per model."""
