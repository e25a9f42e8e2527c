"""The jobs: each opens what it needs, and leaves the logic to transforms."""
