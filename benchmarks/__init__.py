"""What the session state costs. Each file with a command line runs as ``python -m benchmarks.NAME``.

Each prints a table for people, and one JSON object as the last line of its output for machines.
"""
