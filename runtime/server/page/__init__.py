"""The zoo's page: HTML from the catalogue and the server's state, for a browser without anything from another host."""
