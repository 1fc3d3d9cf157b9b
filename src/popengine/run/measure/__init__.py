"""What runs are measured by: the recorder, memory, costs of pieces, floating point exceptions."""
