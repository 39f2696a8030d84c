"""A request as the user asks for it, on every model: its prompt, its plan checked against the model, its answers and its outputs."""
