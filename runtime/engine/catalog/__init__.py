"""What a scheduler is told of stored models: chains as blocks, variants, surrogates, profiles."""
