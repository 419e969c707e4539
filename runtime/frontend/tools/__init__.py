"""Tools of chats: what requests declare, how families write calls, and calls read from answers."""
