"""Names of other libraries, for programs where those are absent; poprun puts this folder on the path of instances."""
