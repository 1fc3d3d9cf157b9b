"""Reports: what will run (`overview`, `planned`), and profiles of what ran (`reporter`)."""
