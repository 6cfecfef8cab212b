"""Tests of LoRA: numbers, layouts, checkpoints and whole updates."""
