"""Controllers, their meeting point and the order of the prompts. Imports nothing that computes."""
