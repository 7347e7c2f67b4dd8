"""The file in which a worker keeps its figures for the server."""
