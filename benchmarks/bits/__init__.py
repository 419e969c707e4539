"""Which bits a row's result has: in any company, and beside those of other dtypes and of transformers."""
