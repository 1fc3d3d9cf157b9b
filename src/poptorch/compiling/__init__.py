"""From a model and the arguments of one call to what can be run and saved."""
