"""What came of a comparison: JSON, a table and a page."""
