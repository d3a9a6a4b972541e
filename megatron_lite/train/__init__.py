"""The training program: one step, the loop around it, what it reports and how it ends."""
