"""Example tasks, one folder each. A folder makes its own data and a model to start from."""
