"""The executor: a wrapped model, its devices, its weights, its files."""
