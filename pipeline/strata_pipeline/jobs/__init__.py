"""The jobs: each opens what it needs, and leaves the thinking to transforms."""
