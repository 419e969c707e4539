"""Operations on stored models: load, export, remove, create."""
