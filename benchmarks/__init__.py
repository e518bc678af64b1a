"""Claims of speed and quality, each a script that prints a table and writes JSON."""
