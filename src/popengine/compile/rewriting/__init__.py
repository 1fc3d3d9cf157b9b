"""Passes from graph to graph: float types, products of half precision, memory layout."""
