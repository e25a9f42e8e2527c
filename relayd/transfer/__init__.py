"""The log out of one database and into another."""
