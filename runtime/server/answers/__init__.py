"""Forms of answers: how each generating route takes requests and words what was generated."""
