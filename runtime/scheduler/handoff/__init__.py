"""Hand sequences off from devices that compute contexts to devices that decode (TetriInfer), and change roles."""
