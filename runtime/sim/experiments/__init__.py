"""The papers' experiments: scenarios, presets, studies."""
