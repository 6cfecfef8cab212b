"""Reward models: a vision-language model reads prompt, media and answer, and says or labels how good the answer is."""
