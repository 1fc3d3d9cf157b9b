"""What capture writes down: operations, weights that come another way, losses, known values."""
