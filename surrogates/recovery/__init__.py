"""Recovery after pruning: closed form, LoRA, training that can be stopped."""
