"""The policy in vLLM: ready engine inputs in, sampled groups out, weights replaced while it runs."""
