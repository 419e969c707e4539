"""Keys of clients beside the server's own: what each may do, and what it uses."""
