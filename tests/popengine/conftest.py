"""Being here, it lets the folders below import `engine_models`."""
