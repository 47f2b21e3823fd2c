"""What the planner claims, as commands that print the figure."""
