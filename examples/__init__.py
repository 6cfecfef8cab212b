"""Example tasks: a folder each, with what makes its data, a model to start from, and how to run it."""
