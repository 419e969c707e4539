"""The family of a real chat model: where its weights come from, and the conversations it is fine-tuned on."""
