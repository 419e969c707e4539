"""The executors over pages: whole models and stages of chains."""
