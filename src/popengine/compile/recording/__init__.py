"""The recording of a forward: operations, stand-ins of weights, losses, values that are known meanwhile."""
