"""Places below the device that can hold a session's bytes: one file a tier."""
