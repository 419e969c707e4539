"""Recovery after pruning: closed-form refit, LoRA, resumable training."""
