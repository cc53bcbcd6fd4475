"""What is asked of a server, when, and what the answers amount to."""
