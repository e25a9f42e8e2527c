"""A relay as a process, or several: start, ports, reloads, chores, drain and stop."""
