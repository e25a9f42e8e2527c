"""Functions from datasets to datasets, without I/O of their own."""
