"""Who runs what when: tasks, the ready queue, workers, replays."""
