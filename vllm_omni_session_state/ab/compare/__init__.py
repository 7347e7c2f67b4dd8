"""Where two runs differ, bit by bit."""
