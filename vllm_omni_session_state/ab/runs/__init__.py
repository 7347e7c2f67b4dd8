"""One served run, in a process of its own, and how it is watched."""
