"""Answers that follow schemas: whether all of them are valid, and what that costs them and the rows beside them."""
