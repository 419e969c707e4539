"""Add, replace and withdraw models and versions of models during operation."""
