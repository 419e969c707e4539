"""Requests that outlive the server: run apart from their connections, journalled, taken up again at the next start."""
