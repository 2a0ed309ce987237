"""The next token of each sequence: penalties, cuts, random draws, top-k."""
