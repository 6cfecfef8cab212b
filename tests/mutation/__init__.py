"""Mutation testing: small changes of the product's code, which some test must notice."""
