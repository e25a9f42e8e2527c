"""Plain HTTP on the relay's port."""
