"""Being here, it lets the folders below import `executor_models`."""
