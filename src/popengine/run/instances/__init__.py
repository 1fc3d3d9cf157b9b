"""Several processes that train together: connections, checks of equality, all-reduce."""
