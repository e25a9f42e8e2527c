"""Whether a published packet enters the log: the checks of relay.md §11 (decision A-059), in their order."""
