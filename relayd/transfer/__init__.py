"""Export of the log from one database and import into another."""
