"""Traces of publishes and of reading, by option. Off, none of it is called."""
