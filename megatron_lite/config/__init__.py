"""A run's configuration: its schema, how it is read from flags and files, what is checked, and what a start says."""
