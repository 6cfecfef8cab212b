"""Generative reward models: a vision-language model reads prompt, media and answer, and says how good the answer is."""
