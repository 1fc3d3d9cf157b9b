"""What an engine keeps, and where it lies: stores, results, random numbers."""
