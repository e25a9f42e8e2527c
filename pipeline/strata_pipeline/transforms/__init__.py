"""Functions from datasets to datasets, without reading or writing."""
