"""What users are told: logs, errors, profiles, counters, what will run."""
