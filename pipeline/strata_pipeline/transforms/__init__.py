"""Functions from datasets to datasets; none reads or writes anything."""
