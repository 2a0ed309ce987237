"""What was measured: statistics, objectives, tables, the page."""
