"""Being here, it lets the folders below import what stands in for devices."""
