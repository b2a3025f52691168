"""What the processes of a database tell about themselves: metrics, activities, traces, costs."""
