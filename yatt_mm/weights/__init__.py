"""Carrying the policy's weights from the trainer to the engines."""
