"""Optional traces of publishes and of reading. When they are off, nothing here is called."""
