"""The weight update: rules, their kernels, clipping, rounding."""
