"""The recording of a forward: operations, stand-ins of weights, losses, constant folding."""
