"""The `ratoon` command."""
