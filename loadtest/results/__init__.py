"""Results of runs: statistics, service level objectives, tables, and the HTML page."""
