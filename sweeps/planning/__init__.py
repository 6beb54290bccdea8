"""What a night is to do: the typed plan, its search spaces, what it costs."""
