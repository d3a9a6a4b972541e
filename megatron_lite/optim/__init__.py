"""What happens between the last backward and the next forward: reduce, clip, update, and the schedules of all that."""
