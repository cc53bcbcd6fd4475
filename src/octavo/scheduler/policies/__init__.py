"""Who is next: a file for each policy."""
