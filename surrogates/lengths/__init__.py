"""Predict how long a model's answers will get (TetriInfer, section 3.3.2): prompts, training, the predictor."""
