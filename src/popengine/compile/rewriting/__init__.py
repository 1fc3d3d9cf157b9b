"""Passes from graph to graph: products of half precision, memory layout."""
