"""Graph to graph: float types, partial sums, memory layout."""
